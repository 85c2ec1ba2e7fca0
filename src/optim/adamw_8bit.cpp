#include "optim/adamw_8bit.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include <ATen/ops/bucketize.h>

#include "core/aten.h"
#include "ops/op_mark.h"

namespace kiln {

namespace {

constexpr int64_t kChunk = int64_t{1}
                           << 22;  // elements that are updated at once: they bound what is temporary

// Buffers of AdamW8bit::state(), in order.
enum Buffer : size_t { kMean, kMeanScale, kSquare, kSquareScale, kSmallMean, kSmallSquare };

// A table of values and what lies between neighbours: what is nearest to a value is found by these.
struct Table {
  at::Tensor values, midpoints;

  explicit Table(bool is_signed) : values(dynamic_map(is_signed)) {
    midpoints = (values.narrow(0, 1, 255) + values.narrow(0, 0, 255)) / 2;
  }
  Table(const Table& other, at::Device device)
      : values(other.values.to(device)), midpoints(other.midpoints.to(device)) {}
  // places (blocks, width) u8, scales (blocks) -> f32
  at::Tensor read(const at::Tensor& places, const at::Tensor& scales) const {
    return values.index_select(0, places.to(at::kInt).view(-1))
        .view(places.sizes())
        .mul_(scales.unsqueeze(-1));
  }
  void write(const at::Tensor& moment, at::Tensor places, at::Tensor scales) const {
    scales.copy_(moment.abs().amax(-1));
    const at::Tensor divisor = at::where(scales == 0, at::ones_like(scales), scales);
    places.copy_(at::bucketize(moment / divisor.unsqueeze(-1), midpoints, /*out_int32=*/true));
  }
};

// Elements of a slot in the slice, and where its moments are.
struct Part {
  int64_t begin = 0, count = 0;  // in the slice
  int64_t places = 0, scales = 0;
};

// Some whole blocks, or the last one of a slot, which may be narrower.
struct Blocks {
  int64_t begin = 0, places = 0, scales = 0, count = 0, width = AdamW8bit::kBlock;

  at::Tensor of(const at::Tensor& flat, int64_t first) const {
    return flat.narrow(0, first, count * width).view({count, width});
  }
};

std::vector<Blocks> blocks_of(const Part& part) {
  std::vector<Blocks> all;
  for (int64_t done = 0; done < part.count;) {
    const int64_t left = part.count - done, block = AdamW8bit::kBlock;
    Blocks next{.begin = part.begin + done,
                .places = part.places + done,
                .scales = part.scales + done / block,
                .count = std::min(left, kChunk) / block};
    if (next.count == 0) next.count = 1, next.width = left;
    done += next.count * next.width;
    all.push_back(next);
  }
  return all;
}

}  // namespace

// For each power of ten from 1e-6 to 1, twice as many values as for the one before, in the middles of equal
// parts of [0.1, 1] times it; then 0 and 1.
at::Tensor dynamic_map(bool is_signed) {
  constexpr int kPowers = 7;
  std::vector<at::Tensor> values = {at::zeros({1}), at::ones({1})};
  for (int i = 0; i < kPowers; ++i) {
    const int64_t count = int64_t{1} << (is_signed ? i : i + 1);
    const at::Tensor ends = at::linspace(0.1, 1, count + 1, at::TensorOptions(at::kFloat));
    const at::Tensor middles =
        (ends.narrow(0, 0, count) + ends.narrow(0, 1, count)) / 2.0 * std::pow(10.0, i + 1 - kPowers);
    values.push_back(middles);
    if (is_signed) values.push_back(-middles);
  }
  return std::get<0>(at::cat(values).sort());
}

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
  static const Table kSigned(/*is_signed=*/true), kUnsigned(/*is_signed=*/false);
  const Table signed_table(kSigned, slice.master.device()), unsigned_table(kUnsigned, slice.master.device());
  const double correction1 = 1 - std::pow(options_.beta1, step.update),
               correction2 = std::sqrt(1 - std::pow(options_.beta2, step.update));
  const std::vector<StateBuffer> buffers = state(*slice.layout);
  const auto moments = [&](Buffer buffer) -> at::Tensor& { return slice.moments.at(buffer); };
  const auto runs = [&](Buffer buffer) {
    return state_runs(buffers[buffer], *slice.layout, slice.offset, slice.offset + slice.master.numel());
  };
  const auto update = [&](const Blocks& blocks) {
    const auto places = [&](Buffer buffer) { return blocks.of(moments(buffer), blocks.places); };
    const auto scales = [&](Buffer buffer) { return moments(buffer).narrow(0, blocks.scales, blocks.count); };
    at::Tensor weights = blocks.of(slice.master, blocks.begin);
    const at::Tensor given = blocks.of(slice.grads, blocks.begin);
    ops::OpMark mark("kiln::adamw_8bit", weights, given, places(kMean), places(kSquare));
    mark.outputs(weights, places(kMean), places(kSquare));
    if (weights.is_meta()) {  // a dry run: what is alive at once below
      std::array<at::Tensor, 5> temporaries;
      for (at::Tensor& temporary : temporaries)
        temporary = at::empty({blocks.count, blocks.width}, weights.options());
      return;
    }
    const at::Tensor grad = given.to(at::kFloat) * step.grad_scale;
    at::Tensor mean = signed_table.read(places(kMean), scales(kMeanScale)),
               square = unsigned_table.read(places(kSquare), scales(kSquareScale));
    mean.mul_(options_.beta1).add_(grad, 1 - options_.beta1);
    square.mul_(options_.beta2).addcmul_(grad, grad, 1 - options_.beta2);
    weights.mul_(1 - step.lr * options_.weight_decay)
        .addcdiv_(mean, (square.sqrt() / correction2).add_(options_.eps), -step.lr / correction1);
    signed_table.write(mean, places(kMean), scales(kMeanScale));
    unsigned_table.write(square, places(kSquare), scales(kSquareScale));
  };
  const std::vector<StateRun> places = runs(kMean), scales = runs(kMeanScale), small = runs(kSmallMean);
  for (size_t i = 0; i < places.size(); ++i) {
    const int64_t begin = std::max<int64_t>(0, slice.layout->slots[i].offset - slice.offset);
    for (const Blocks& blocks : blocks_of({.begin = begin,
                                .count = places[i].count,
                                .places = places[i].place,
                                .scales = scales[i].place}))
      update(blocks);
    if (small[i].count == 0) continue;
    const auto part = [&](const at::Tensor& flat, int64_t first) {
      return flat.narrow(0, first, small[i].count);
    };
    at::Tensor weights = part(slice.master, begin), mean = part(moments(kSmallMean), small[i].place),
               square = part(moments(kSmallSquare), small[i].place);
    std::vector<ops::EmaSlice> none;
    ops::adamw_ema_step_(weights, part(slice.grads, begin), mean, square, none, nullptr,
                         options_.at(step.lr, step.update, step.grad_scale));
  }
  slice.follow_master();
}

}  // namespace kiln
