// The arithmetic of a denoiser's forward pass, for shares of a machine's peak.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

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

}  // namespace kiln
