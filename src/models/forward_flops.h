// The arithmetic of a denoiser's forward pass, for shares of a machine's peak.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "models/model.h"

namespace kiln {

// Counts what the recorder of operations (ops/op_recorder.h) sees in a dry run of the model on one image. The
// first image of each size takes that run, some milliseconds.
class ForwardFlops {
 public:
  // `model`: a name of the registry. `config`: its settings, as build_denoiser() takes them.
  ForwardFlops(std::string model, nlohmann::json config)
      : model_(std::move(model)), config_(std::move(config)) {}

  // Returns the FLOPs of one image's forward pass: two for each multiply-add of matrix products, convolutions
  // and attention. They are linear in text_rows. Throws Error if the model does not take the size.
  double operator()(const ImageExtent& image);

 private:
  struct Line {
    double without_text = 0, per_row = 0;
  };
  Line recorded(int64_t height, int64_t width) const;
  Line record(int64_t height, int64_t width) const;

  std::string model_;
  nlohmann::json config_;
  std::map<std::pair<int64_t, int64_t>, Line> known_{};  // by height and width
};

}  // namespace kiln
