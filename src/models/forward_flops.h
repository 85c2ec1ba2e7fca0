// The arithmetic of a model's forward pass, for shares of a machine's peak and for the bound of a step. It is
// that of the model's definition, whatever operations compute it.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "core/json.h"
#include "models/model.h"

namespace kiln {

// Counts what the recorder of operations (ops/op_recorder.h) sees in a dry run of the model on one image. The
// first image of each size that a process asks of a model takes that run, some milliseconds.
class ForwardFlops {
 public:
  // `model`: a name of the registry. `config`: its settings, as build_denoiser() takes them.
  ForwardFlops(std::string model, nlohmann::json config)
      : model_(std::move(model)), config_(std::move(config)), key_(model_ + ' ' + config_.dump()) {}

  // Returns the FLOPs of one image's forward pass: two for each multiply-add of matrix products, convolutions
  // and attention. They are linear in text_rows. Throws Error if the model does not take the size.
  double operator()(const ImageExtent& image) const;

 private:
  struct Line {
    double without_text = 0, per_row = 0;
  };
  Line record(int64_t height, int64_t width) const;

  std::string model_;
  nlohmann::json config_;
  std::string key_;  // names both
};

// What the definition of one segment asks of a forward pass.
struct SegmentWork {
  std::string name;
  double flops = 0;       // of its matrix products, convolutions and attention
  double kept_bytes = 0;  // of what they multiply, without weights: each tensor once, for a backward
};
// Counts in dry runs. Nothing is kept in more bits than `held` has. An operand of several segments counts in
// the first. REQUIRES: model and input are on meta. The model computes in f32: a cast would be kept as well.
std::vector<SegmentWork> forward_work(const SegmentModel& model, const ModelInput& input,
                                      at::ScalarType held);
// Does so for one image, linear in its text_rows. Throws Error if the model does not take the size.
std::vector<SegmentWork> forward_work(const Denoiser& denoiser, const ImageExtent& image,
                                      at::ScalarType held);

}  // namespace kiln
