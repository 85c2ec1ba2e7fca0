// Where tensors lie in the flat memory of a unit of training state.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kiln {

// A tensor's place in the flat buffers of its unit, in elements.
struct FlatSlot {
  std::string key;
  std::vector<int64_t> shape;
  int64_t offset = 0, numel = 0;
};

// Places tensors one after another, each on a multiple of `alignment` elements, so that all buffers of a unit
// share one set of offsets. 32 elements are 64 bytes or more in every dtype that is computed in. Elements
// between slots are zero for life.
struct FlatLayout {
  static constexpr int64_t kAlignment = 32;

  std::vector<FlatSlot> slots;
  int64_t size = 0;                // elements, a multiple of `alignment`
  int64_t alignment = kAlignment;  // elements, a multiple of kAlignment; set before the first add()

  void add(const std::string& key, const std::vector<int64_t>& shape);
};

// n rounded up to a multiple.
inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace kiln
