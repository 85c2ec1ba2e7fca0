// AdamW with moments of 8 bits, composed of ATen's operations.
#include <ATen/ops/bucketize.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "core/aten.h"
#include "ops/op_mark.h"
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

void step_blocks(const Blocks& blocks, const at::Tensor& all_weights, const at::Tensor& grads,
                 const Moment8bit& kept_mean, const Moment8bit& kept_square, const AdamWStep& o) {
  static const Table kSigned(/*is_signed=*/true), kUnsigned(/*is_signed=*/false);
  at::Tensor weights = blocks.elements(all_weights);
  const at::Tensor given = blocks.elements(grads), mean_places = blocks.elements(kept_mean.places),
                   square_places = blocks.elements(kept_square.places);
  OpMark mark("kiln::adamw_8bit", weights, given, mean_places, square_places);
  mark.outputs(weights, mean_places, square_places);
  if (weights.is_meta()) {  // a dry run: allocates what is alive at once below
    std::array<at::Tensor, 5> temporaries;
    for (at::Tensor& temporary : temporaries)
      temporary = at::empty({blocks.count, blocks.width}, weights.options());
    return;
  }
  const Table signed_table(kSigned, weights.device()), unsigned_table(kUnsigned, weights.device());
  const double correction1 = 1 - std::pow(o.beta1, o.step),
               correction2 = std::sqrt(1 - std::pow(o.beta2, o.step));
  const at::Tensor grad = given.to(at::kFloat) * o.grad_scale;
  at::Tensor mean = signed_table.read(mean_places, blocks.scales(kept_mean.scales)),
             square = unsigned_table.read(square_places, blocks.scales(kept_square.scales));
  mean.mul_(o.beta1).add_(grad, 1 - o.beta1);
  square.mul_(o.beta2).addcmul_(grad, grad, 1 - o.beta2);
  weights.mul_(1 - o.lr * o.weight_decay)
      .addcdiv_(mean, (square.sqrt() / correction2).add_(o.eps), -o.lr / correction1);
  signed_table.write(mean, mean_places, blocks.scales(kept_mean.scales));
  unsigned_table.write(square, square_places, blocks.scales(kept_square.scales));
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
