// Where tensors lie in the flat memory of a unit of training state, and what an optimizer keeps for them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace kiln {

// A tensor's place in the flat buffers of its unit, in elements.
struct FlatSlot {
  std::string key;
  std::vector<int64_t> shape;
  int64_t offset = 0, numel = 0;
};

// Places tensors one after another, each on a multiple of `alignment` elements, so that all buffers of a unit
// share one set of offsets. 32 elements are at least 64 bytes in every compute dtype. Elements between slots
// always stay zero.
struct FlatLayout {
  static constexpr int64_t kAlignment = 32;

  std::vector<FlatSlot> slots;
  int64_t size = 0;                // elements, a multiple of `alignment`
  int64_t alignment = kAlignment;  // elements, a multiple of kAlignment; set before the first add()

  void add(const std::string& key, const std::vector<int64_t>& shape);
};

// Rounds n up to a multiple of `multiple`.
inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// What an optimizer keeps for one tensor: `values` values for every group of `elements` elements, in order.
// The last group may be smaller. AdamW's mean has one value per element, CAME's row means have `rows` values
// per matrix, and block scales have one value per block.
struct StateSlot {
  std::vector<int64_t> shape;        // of all values, as in a checkpoint
  int64_t elements = 1, values = 0;  // values 0: nothing is kept for this tensor
};

// All values that are kept under one name. A flat buffer has one value for every `block` elements of the
// unit's memory, padding included, so that one pass can run over all of it. A packed buffer holds the values
// of each slot right after those of the slot before.
struct StateBuffer {
  std::string name;  // "exp_avg": for the keys in checkpoints, and for people
  Dtype dtype = Dtype::kF32;
  int64_t block = 1;                   // flat: elements per value; divides the layout's alignment
  std::vector<StateSlot> packed = {};  // by slot of the layout; empty: the buffer is flat

  // Returns what is kept for slot `index`.
  StateSlot slot(const FlatLayout& layout, size_t index) const;
};

// Values of a slot that belong to a range of the unit's elements.
struct StateRun {
  int64_t first = 0;  // among all values of the slot
  int64_t place = 0;  // in the buffer
  int64_t count = 0;
};

// Returns for each slot of the layout which values a buffer for elements [begin, end) of the unit holds. A
// value whose elements are in two ranges is in the buffers of both.
std::vector<StateRun> state_runs(const StateBuffer& buffer, const FlatLayout& layout, int64_t begin,
                                 int64_t end);

// Returns the part of `run` for elements [first, last) of its slot, which keeps `kept`. A value of several
// elements belongs to the range of its first element, so ranges that divide a slot also divide its values.
StateRun part_of(const StateRun& run, const StateSlot& kept, int64_t first, int64_t last);

// Returns how many values a buffer for `shard` elements has room for. It is the same on every rank: as many
// as the fullest shard needs. `size`: elements of the unit, a multiple of `shard`.
int64_t state_values(const StateBuffer& buffer, const FlatLayout& layout, int64_t size, int64_t shard);

}  // namespace kiln
