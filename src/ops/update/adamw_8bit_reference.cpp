// AdamW with moments of 8 bits, composed of ATen's operations.
#include <ATen/ops/bucketize.h>

#include <algorithm>
#include <cmath>

#include "core/aten.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"
#include "ops/planned/planned.h"
#include "ops/update/adamw_8bit.h"

namespace kiln::ops::reference {
namespace {

// Elements that are updated at once. They bound the temporary memory.
constexpr int64_t kChunk = int64_t{1} << 22;

// A table of values and the midpoints between neighbours, by which the value nearest to a number is found.
struct Table {
  at::Tensor values, midpoints;

  explicit Table(bool is_signed) : values(dynamic_map(is_signed)) {
    midpoints = (values.narrow(0, 1, 255) + values.narrow(0, 0, 255)) / 2;
  }
  Table(const Table& other, at::Device device)
      : values(other.values.to(device)), midpoints(other.midpoints.to(device)) {}
  // Reads places (blocks, width) u8 with scales (blocks) as f32.
  at::Tensor read(const at::Tensor& places, const at::Tensor& scales) const {
    return values.index_select(0, places.to(at::kInt).view(-1))
        .view(places.sizes())
        .mul_(scales.unsqueeze(-1));
  }
  void write(const at::Tensor& moment, const at::Tensor& places, const at::Tensor& scales) const {
    scales.copy_(moment.abs().amax(-1));
    const at::Tensor divisor = at::where(scales == 0, at::ones_like(scales), scales);
    places.copy_(at::bucketize(moment / divisor.unsqueeze(-1), midpoints, /*out_int32=*/true));
  }
};

// Some whole blocks, or the last block alone, which may be narrower.
struct Blocks {
  int64_t begin = 0, count = 0, width = kBlockOf8Bits;

  at::Tensor elements(const at::Tensor& flat) const {
    return flat.narrow(0, begin, count * width).view({count, width});
  }
  at::Tensor scales(const at::Tensor& all) const { return all.narrow(0, begin / kBlockOf8Bits, count); }
};

// Steps blocks: weights, grads and places are (blocks, width), scales (blocks).
void step_composed(const at::Tensor& weights, const at::Tensor& grads, const Moment8bit& kept_mean,
                   const Moment8bit& kept_square, const AdamWStep& o) {
  static const Table kSigned(/*is_signed=*/true), kUnsigned(/*is_signed=*/false);
  const Table signed_table(kSigned, weights.device()), unsigned_table(kUnsigned, weights.device());
  const double correction1 = 1 - std::pow(o.beta1, o.step),
               correction2 = std::sqrt(1 - std::pow(o.beta2, o.step));
  const at::Tensor grad = grads.to(at::kFloat) * o.grad_scale;
  at::Tensor mean = signed_table.read(kept_mean.places, kept_mean.scales),
             square = unsigned_table.read(kept_square.places, kept_square.scales);
  mean.mul_(o.beta1).add_(grad, 1 - o.beta1);
  square.mul_(o.beta2).addcmul_(grad, grad, 1 - o.beta2);
  weights.mul_(1 - o.lr * o.weight_decay)
      .addcdiv_(mean, (square.sqrt() / correction2).add_(o.eps), -o.lr / correction1);
  signed_table.write(mean, kept_mean.places, kept_mean.scales);
  unsigned_table.write(square, kept_square.places, kept_square.scales);
}

constexpr auto kStepBlocks = on_all(step_composed, planned::adamw_8bit_blocks);

void step_blocks(const Blocks& blocks, const at::Tensor& all_weights, const at::Tensor& all_grads,
                 const Moment8bit& all_means, const Moment8bit& all_squares, const AdamWStep& options) {
  const at::Tensor weights = blocks.elements(all_weights), grads = blocks.elements(all_grads);
  const Moment8bit mean{blocks.elements(all_means.places), blocks.scales(all_means.scales)},
      square{blocks.elements(all_squares.places), blocks.scales(all_squares.scales)};
  OpMark mark("kiln::adamw_8bit", weights, grads, mean.places, square.places);
  mark.outputs(weights, mean.places, square.places);
  kStepBlocks.on(weights)(weights, grads, mean, square, options);
}

}  // namespace

void adamw_8bit_step_(const at::Tensor& weights, const at::Tensor& grads, const Moment8bit& mean,
                      const Moment8bit& square, const at::Tensor& compute, const AdamWStep& options) {
  const at::NoGradGuard no_grad;
  for (int64_t done = 0; done < weights.numel();) {
    const int64_t left = weights.numel() - done;
    Blocks next{.begin = done, .count = std::min(left, kChunk) / kBlockOf8Bits};
    if (next.count == 0) next.count = 1, next.width = left;
    step_blocks(next, weights, grads, mean, square, options);
    done += next.count * next.width;
  }
  if (compute.defined()) compute.copy_(weights);
}

}  // namespace kiln::ops::reference
