// What `kiln train` trains of a model when it is not the model itself: an adapter (LoRA).
#pragma once
#include <cstdint>
#include <string>

namespace kiln {

struct LoraOptions {
  int64_t rank = 0;     // of fresh adapters; 0: the model itself is trained, or `weights` say it
  double alpha = 0;     // their part is scaled by alpha / rank; 0: the rank
  double dropout = 0;   // probability of zeroing an element of an adapted layer's input
  std::string target;   // regular expression of layers' names, whole or from a dot on; empty: attention
  std::string weights;  // an adapter to start from, which says its layers, ranks and scales itself

  bool is_on() const { return rank > 0 || !weights.empty(); }
};

}  // namespace kiln
