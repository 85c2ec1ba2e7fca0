#include "optim/adamw_8bit.h"

#include <algorithm>

#include "core/aten.h"
#include "ops/kernels.h"

namespace kiln {

namespace {

// Buffers of AdamW8bit::state(), in order.
enum Buffer : size_t { kMean, kMeanScale, kSquare, kSquareScale, kSmallMean, kSmallSquare };

}  // namespace

std::vector<StateBuffer> AdamW8bit::state(const FlatLayout& layout) const {
  std::vector<StateBuffer> buffers = {{.name = "exp_avg", .dtype = Dtype::kU8},
                                      {.name = "exp_avg_absmax"},
                                      {.name = "exp_avg_sq", .dtype = Dtype::kU8},
                                      {.name = "exp_avg_sq_absmax"},
                                      {.name = "exp_avg"},
                                      {.name = "exp_avg_sq"}};
  for (const FlatSlot& slot : layout.slots) {
    const bool is_small = slot.numel < kFewestElements;
    const StateSlot nothing, each{.shape = slot.shape, .elements = 1, .values = 1},
        scales{.shape = {(slot.numel + kBlock - 1) / kBlock}, .elements = kBlock, .values = 1};
    for (const Buffer buffer : {kMean, kSquare}) buffers[buffer].packed.push_back(is_small ? nothing : each);
    for (const Buffer buffer : {kMeanScale, kSquareScale})
      buffers[buffer].packed.push_back(is_small ? nothing : scales);
    for (const Buffer buffer : {kSmallMean, kSmallSquare})
      buffers[buffer].packed.push_back(is_small ? each : nothing);
  }
  return buffers;
}

void AdamW8bit::step(OptimizerSlice& slice, const OptimizerStep& step) const {
  at::NoGradGuard no_grad;
  const ops::AdamWStep now = options_.at(step.lr, step.update, step.grad_scale);
  const std::vector<StateBuffer> buffers = state(*slice.layout);
  const auto runs = [&](Buffer buffer) {
    return state_runs(buffers[buffer], *slice.layout, slice.offset, slice.offset + slice.master.numel());
  };
  const auto moment = [&](Buffer buffer, const StateRun& run) {
    return slice.moments.at(buffer).narrow(0, run.place, run.count);
  };
  // On a CPU the passes also write the compute weights.
  const bool copies = slice.compute_weights && ops::computes_on_cpu(slice.master);
  const std::vector<StateRun> places = runs(kMean), scales = runs(kMeanScale), small = runs(kSmallMean);
  for (size_t i = 0; i < places.size(); ++i) {
    const int64_t begin = std::max<int64_t>(0, slice.layout->slots[i].offset - slice.offset),
                  count = places[i].count + small[i].count;
    if (count == 0) continue;
    const auto part = [&](const at::Tensor& flat) { return flat.narrow(0, begin, count); };
    at::Tensor weights = part(slice.master), compute = copies ? part(*slice.compute_weights) : at::Tensor();
    if (small[i].count == 0) {
      ops::adamw_8bit_step_(weights, part(slice.grads),
                            {.places = moment(kMean, places[i]), .scales = moment(kMeanScale, scales[i])},
                            {.places = moment(kSquare, places[i]), .scales = moment(kSquareScale, scales[i])},
                            compute, now);
      continue;
    }
    at::Tensor mean = moment(kSmallMean, small[i]), square = moment(kSmallSquare, small[i]);
    std::vector<ops::EmaSlice> none;
    ops::adamw_ema_step_(weights, part(slice.grads), mean, square, none, copies ? &compute : nullptr, now);
  }
  if (copies)
    follow_master_between_slots(slice);
  else
    slice.follow_master();
}

}  // namespace kiln
