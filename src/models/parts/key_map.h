// Weights between two sets of published keys of one model, where one of them holds some projections as a
// single matrix.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "models/family.h"

namespace kiln {

struct KeyMap {
  // One matrix, whose rows are those of the parts one after another.
  struct Projection {
    std::string fused;
    std::vector<std::string> parts;
  };
  std::vector<std::pair<std::string, std::string>> renamed{};  // key in the fused set, key in the other
  std::vector<Projection> projections{};
  std::vector<std::string> fused_only{};  // what the other set has no place for

  // Adds name.weight and name.bias.
  void rename_layer(const std::string& fused, const std::string& parted);
  void add_projection(const std::string& fused, const std::vector<std::string>& parts, bool bias);
};

// From the fused set to the other and back. Also of gradients. Throws Error listing missing and unknown keys,
// and for parts that have unequal rows.
TensorMap parted_weights(const KeyMap& map, const TensorMap& fused, const std::string& source);
TensorMap fused_weights(const KeyMap& map, const TensorMap& parted, const std::string& source);

}  // namespace kiln
