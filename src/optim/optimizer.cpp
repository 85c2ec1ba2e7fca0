#include "optim/optimizer.h"

#include <algorithm>

#include "core/aten.h"

namespace kiln {

void OptimizerSlice::follow_master() {
  for (ops::EmaSlice& ema : emas) ema.weights.lerp_(master, 1 - ema.decay);
  if (compute_weights) compute_weights->copy_(master);
}

void follow_master_between_slots(OptimizerSlice& slice) {
  for (ops::EmaSlice& ema : slice.emas) ema.weights.lerp_(slice.master, 1 - ema.decay);
  if (!slice.compute_weights) return;
  const int64_t length = slice.master.numel();
  int64_t done = 0;  // of the slice
  const auto copy_until = [&](int64_t end) {
    if (end > done)
      slice.compute_weights->narrow(0, done, end - done).copy_(slice.master.narrow(0, done, end - done));
  };
  for (const FlatSlot& slot : slice.layout->slots) {
    copy_until(std::clamp(slot.offset - slice.offset, int64_t{0}, length));
    done = std::max(done, std::clamp(slot.offset + slot.numel - slice.offset, int64_t{0}, length));
  }
  copy_until(length);
}

}  // namespace kiln
