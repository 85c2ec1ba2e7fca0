// Which model a run trains.
#pragma once
#include <cstdint>
#include <string>

namespace kiln {

struct ModelOptions {
  std::string name = "DiT-S/2";  // of the registry
  std::string config;            // JSON: further settings, over those of the name
  // 0: what the name says.
  int64_t hidden_size = 0, depth = 0, num_heads = 0, patch_size = 0;
  double position_scale = 0;        // that positions are divided by; 0: the model's
  double class_dropout_prob = 0.1;  // of training without the label, for guidance
  int64_t num_classes = 0;          // 0: those of the data
  std::string weights;              // a file to start from; empty: fresh ones
};

}  // namespace kiln
