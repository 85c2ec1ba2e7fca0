// Converts weights between two sets of published keys of one model. One of the sets, the fused one, stores
// some projections as a single matrix.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "models/family.h"

namespace kiln {

struct KeyMap {
  // A matrix that consists of the rows of the parts one after another.
  struct Projection {
    std::string fused;
    std::vector<std::string> parts;
  };
  std::vector<std::pair<std::string, std::string>> renamed{};  // key in the fused set, key in the other
  std::vector<Projection> projections{};
  std::vector<std::string> fused_only{};  // keys that have no place in the other set

  // Adds the weight and the bias of a layer.
  void rename_layer(const std::string& fused, const std::string& parted);
  void add_projection(const std::string& fused, const std::vector<std::string>& parts, bool bias);
};

// Converts from the fused set to the other, or back. Works for gradients too. Throws Error listing missing
// and unknown keys, and for a projection whose parts are unequal.
TensorMap parted_weights(const KeyMap& map, const TensorMap& fused, const std::string& source);
TensorMap fused_weights(const KeyMap& map, const TensorMap& parted, const std::string& source);

}  // namespace kiln
