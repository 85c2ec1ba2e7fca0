// What an optimizer keeps of a unit, in buffers that are divided among ranks as the unit's elements are.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/flat/flat_layout.h"

namespace kiln {

// What is kept of one tensor: `values` values for every `elements` elements, in order. The last elements may
// be fewer. AdamW's mean has one value for every element, CAME's row means have `rows` values for every
// matrix, a scale of blocks has one for every block.
struct StateSlot {
  std::vector<int64_t> shape;        // of all values, as a checkpoint holds them
  int64_t elements = 1, values = 0;  // values 0: nothing is kept of this tensor
};

// All that is kept under one name. A buffer is flat, with one value for every `block` elements of the unit's
// memory (paddings too, so that one pass may run over all of it), or packed: what it keeps of each slot lies
// right behind what it keeps of the one before.
struct StateBuffer {
  std::string name;  // "exp_avg": of the keys in checkpoints, and for people
  Dtype dtype = Dtype::kF32;
  int64_t block = 1;                   // flat: elements for each value; divides the layout's alignment
  std::vector<StateSlot> packed = {};  // by slot of the layout; empty: the buffer is flat

  // What is kept of slot `index`.
  StateSlot slot(const FlatLayout& layout, size_t index) const;
};

// Values of a slot that belong to a range of the unit's elements.
struct StateRun {
  int64_t first = 0;  // in the tensor of all values of the slot
  int64_t place = 0;  // in the buffer
  int64_t count = 0;
};

// By slot of the layout: what a buffer for elements [begin, end) of the unit holds. Values whose elements are
// in two ranges are in the buffers of both.
std::vector<StateRun> state_runs(const StateBuffer& buffer, const FlatLayout& layout, int64_t begin,
                                 int64_t end);

// The part of `run` (of a slot that keeps `kept`) for elements [first, last) of the slot alone: of values
// that belong to several elements, those whose first element is in the range. Ranges that divide a slot
// divide its values.
StateRun part_of(const StateRun& run, const StateSlot& kept, int64_t first, int64_t last);

// Values that a buffer for any `shard` elements has room for, whichever rank's they are: as many as the
// fullest one needs. `size`: of the unit, a multiple of `shard`.
int64_t state_values(const StateBuffer& buffer, const FlatLayout& layout, int64_t size, int64_t shard);

}  // namespace kiln
