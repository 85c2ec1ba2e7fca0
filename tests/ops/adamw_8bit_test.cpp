// AdamW of 8 bits in one pass against its composition; that moments become the nearest place of the table, by
// every instruction set, near midpoints too.
#include "ops/update/adamw_8bit.h"

#include <hwy/targets.h>

#include <cmath>
#include <limits>

#include <ATen/ops/bucketize.h>

#include "ops/checks.h"

namespace kiln::ops {
namespace {

using Step8bit = void (*)(const at::Tensor&, const at::Tensor&, const Moment8bit&, const Moment8bit&,
                          const at::Tensor&, const AdamWStep&);

AdamWStep options_8bit(double beta1, double beta2) {
  AdamWStep options = adamw_options(0.3);
  options.lr = 1e-2;
  options.beta1 = beta1;
  options.beta2 = beta2;
  return options;
}

struct State8bit {
  explicit State8bit(int64_t size)
      : weights(randn({size}, at::kFloat, 1)),
        compute(at::zeros({size}, at::kBFloat16)),
        mean{.places = (randn({size}, at::kFloat, 2) * 40 + 127).clamp(0, 255).to(at::kByte),
             .scales = randn({at::divup(size, 256)}, at::kFloat, 3).abs()},
        square{.places = (randn({size}, at::kFloat, 4) * 60 + 127).clamp(0, 255).to(at::kByte),
               .scales = randn({at::divup(size, 256)}, at::kFloat, 5).abs()} {}
  Tensors all() const { return {weights, compute, mean.scales, square.scales, mean.places, square.places}; }
  at::Tensor weights, compute;
  Moment8bit mean, square;
};

State8bit stepped_8bit(Step8bit step, int64_t size, at::ScalarType dtype, bool copies = true) {
  State8bit state(size);
  step(state.weights, randn({size}, dtype, 6), state.mean, state.square,
       copies ? state.compute : at::Tensor(), options_8bit(0.9, 0.999));
  return state;
}

TEST(Adamw8bit, IsItsComposition) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf})
    for (const int64_t size : {0, 5, 256, 100'001}) {
      SCOPED_TRACE(size);
      const Tensors fused = stepped_8bit(&adamw_8bit_step_, size, dtype).all(),
                    composed = stepped_8bit(&reference::adamw_8bit_step_, size, dtype).all();
      for (const size_t i : {0, 2, 3}) expect_close(fused[i], composed[i], 1e-6);
      expect_close(fused[1], composed[1], 1.0 / 256);
      for (const size_t i : {4, 5}) {  // roundings differ, and may cross a midpoint
        const at::Tensor apart = (fused[i].to(at::kInt) - composed[i].to(at::kInt)).abs();
        EXPECT_LE(apart.sum().item<int64_t>(), size / 10'000) << i;
      }
    }
  EXPECT_EQ(stepped_8bit(&adamw_8bit_step_, 5000, at::kFloat, false).compute.abs().max().item<float>(), 0);
}

// Each midpoint between values of the table and its neighbours in f32, zeros, what is tiny and others.
at::Tensor near_midpoints(bool is_signed) {
  const at::Tensor map = dynamic_map(is_signed),
                   midpoints = (map.narrow(0, 1, 255) + map.narrow(0, 0, 255)) / 2;
  std::vector<float> values = {0.0f, -0.0f, 1.0f, 1e-45f, -1e-45f, 1e-30f, -1e-12f, 0x1p-23f, -0x1p-23f};
  for (int64_t i = 0; i < midpoints.numel(); ++i) {
    const float at = midpoints.const_data_ptr<float>()[i];
    for (const float to : {-2.0f, at, 2.0f}) values.push_back(std::nextafter(at, to));
    for (const float to : {-2.0f, at, 2.0f}) values.push_back(std::nextafter(-at, to));
  }
  const at::Tensor random =
      randn({20'000}, at::kFloat, 7).tanh() * randn({20'000}, at::kFloat, 8).mul(4).exp();
  return at::cat({at::tensor(values), random.clamp(-1, 1)});
}

// Places of the moments that gradients become when nothing of the old ones is kept. Each block's largest
// is 1.
Tensors places_of_gradients(const at::Tensor& values) {
  const int64_t blocks = at::divup(values.numel(), 255);
  at::Tensor grads = at::zeros({blocks, 256});
  grads.narrow(1, 0, 255).copy_(
      at::constant_pad_nd(values, {0, blocks * 255 - values.numel()}).view({blocks, 255}));
  grads.select(1, 255).fill_(1);
  State8bit state(blocks * 256);
  AdamWStep options = options_8bit(0, 0);
  options.grad_scale = 1;
  adamw_8bit_step_(state.weights, grads.view(-1), state.mean, state.square, {}, options);
  EXPECT_TRUE(state.mean.scales.eq(1).all().item<bool>());
  const auto without_ones = [&](const at::Tensor& places) {
    return places.view({blocks, 256}).narrow(1, 0, 255).reshape(-1).narrow(0, 0, values.numel());
  };
  return {without_ones(state.mean.places), without_ones(state.square.places)};
}

at::Tensor nearest(const at::Tensor& values, bool is_signed) {
  const at::Tensor map = dynamic_map(is_signed);
  return at::bucketize(values, (map.narrow(0, 1, 255) + map.narrow(0, 0, 255)) / 2).to(at::kByte);
}

TEST(Adamw8bit, FindsTheNearestPlaceByEveryInstructionSet) {
  const at::Tensor signed_values = near_midpoints(true), unsigned_values = near_midpoints(false).abs();
  for (const int64_t target : {HWY_AVX3, HWY_AVX2, HWY_SCALAR}) {
    if ((hwy::SupportedTargets() & target) == 0 && target != HWY_SCALAR) continue;
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::GetChosenTarget().Update(target);
    EXPECT_TRUE(places_of_gradients(signed_values)[0].equal(nearest(signed_values, true)));
    // Squares that come next to the midpoints of their table.
    const at::Tensor roots = unsigned_values.sqrt();
    EXPECT_TRUE(places_of_gradients(roots)[1].equal(nearest(roots * roots, false)));
  }
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

TEST(Adamw8bit, LargeTensorsAreRoundedAsSmallOnes) {
  const State8bit state = stepped_8bit(&adamw_8bit_step_, (int64_t{1} << 20) + 5, at::kFloat);
  EXPECT_TRUE(bitwise_equal(state.compute, state.weights.to(at::kBFloat16)));
}

TEST(Adamw8bit, ThreadsChangeNoBit) {
  expect_same_bits_on_threads([] { return stepped_8bit(&adamw_8bit_step_, 100'001, at::kBFloat16).all(); });
}

TEST(Adamw8bit, RefusesWhatDoesNotFit) {
  State8bit state(300);
  const auto step = [&](const at::Tensor& grads, const Moment8bit& square) {
    adamw_8bit_step_(state.weights, grads, state.mean, square, {}, options_8bit(0.9, 0.999));
  };
  EXPECT_ERROR(step(at::zeros({299}), state.square), "gradients");
  EXPECT_ERROR(step(at::zeros({300}), {state.square.places, at::zeros({1})}), "scales");
}

}  // namespace
}  // namespace kiln::ops
