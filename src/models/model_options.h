// Which model a run trains, whole or through an adapter (LoRA).
#pragma once
#include <cstdint>
#include <string>

namespace kiln {

struct ModelOptions {
  std::string name = "DiT-S/2";  // in the registry
  std::string config;            // JSON: further settings, which override those of the name
  // 0 stands for the value of the name.
  int64_t hidden_size = 0, depth = 0, num_heads = 0, patch_size = 0;
  double position_scale = 0;        // positions are divided by this; 0: the model's own
  double class_dropout_prob = 0.1;  // probability of training without the label, for guidance
  int64_t num_classes = 0;          // 0: as many as the data have
  std::string weights;              // a file to start from; empty: fresh ones
};

struct LoraOptions {
  int64_t rank = 0;    // of fresh adapters; 0: the model itself is trained, unless `weights` names an adapter
  double alpha = 0;    // adapters are scaled by alpha / rank; 0: the rank
  double dropout = 0;  // probability of zeroing an element of an adapted layer's input
  std::string target;  // regular expression of layers' names, whole or from a dot on; empty: attention
  std::string weights;  // an adapter to start from, which brings its own layers, ranks and scales

  bool is_on() const { return rank > 0 || !weights.empty(); }
};

}  // namespace kiln
