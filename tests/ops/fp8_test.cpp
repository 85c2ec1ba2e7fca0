#include "ops/fp8.h"

#include <cmath>

#include "ops/checks.h"
#include "ops/gradient_memory.h"

namespace kiln::ops {
namespace {

constexpr auto kE4m3 = at::kFloat8_e4m3fn, kE5m2 = at::kFloat8_e5m2;

at::Tensor meant(const Fp8Tensor& tensor) { return tensor.values.to(at::kFloat) * tensor.scale; }

bool is_power_of_two(double value) {
  int exponent = 0;
  return std::frexp(value, &exponent) == 0.5;
}

TEST(Fp8, ScalesByAPowerOfTwoAndUsesTheRange) {
  for (const auto& [dtype, largest] : {std::pair{kE4m3, 448.0}, {kE5m2, 57344.0}}) {
    for (const double size : {1e-12, 3e-3, 1.0, 700.0, 1e20}) {
      const at::Tensor x = (randn({64, 48}, at::kFloat, 1) * size).to(at::kBFloat16);
      const Fp8Tensor converted = to_fp8(x, dtype);
      EXPECT_TRUE(is_power_of_two(converted.scale.item<double>()));
      const double peak = converted.values.to(at::kFloat).abs().max().item<double>();
      EXPECT_LE(peak, largest);
      EXPECT_GE(peak, largest / 2.2);
    }
  }
}

// Half a unit in the last place of a value: 2^-4 of it in e4m3, 2^-3 in e5m2; of small ones the smallest
// step.
TEST(Fp8, RoundsEachValueToTheNearest) {
  for (const auto& [dtype, share, step] : {std::tuple{kE4m3, 1.0 / 16, 0x1p-9}, {kE5m2, 1.0 / 8, 0x1p-16}}) {
    const at::Tensor x = randn({256, 256}, at::kBFloat16, 2);
    const Fp8Tensor converted = to_fp8(x, dtype);
    const at::Tensor wide = x.to(at::kFloat), error = (meant(converted) - wide).abs();
    EXPECT_TRUE((error <= wide.abs() * share + converted.scale * step / 2).all().item<bool>());
  }
}

TEST(Fp8, ZerosStayZerosAndNonFiniteValuesShow) {
  EXPECT_TRUE(at::equal(meant(to_fp8(at::zeros({16, 16}), kE4m3)), at::zeros({16, 16})));
  for (const double wrong : {std::nan(""), static_cast<double>(INFINITY)}) {
    at::Tensor x = at::ones({16, 16});
    x[3][5] = wrong;
    EXPECT_FALSE(at::isfinite(meant(to_fp8(x, kE4m3))).all().item<bool>());
  }
}

// The products are those of the rounded operands: exact but for the order of sums and one rounding to bf16.
TEST(Fp8, ProductsOfRoundedOperands) {
  const at::Tensor x = randn({64, 96}, at::kBFloat16, 1), weight = randn({80, 96}, at::kBFloat16, 2),
                   bias = randn({80}, at::kBFloat16, 3), grad = randn({64, 80}, at::kBFloat16, 4) * 1e-4;
  const Fp8Tensor rows = to_fp8(x, kE4m3, Fp8Layout::kBoth), grads = to_fp8(grad, kE5m2, Fp8Layout::kBoth);
  const at::Tensor q_x = meant(rows).to(at::kDouble), q_w = meant(to_fp8(weight, kE4m3)).to(at::kDouble),
                   q_g = meant(grads).to(at::kDouble);
  expect_close(fp8_affine(rows, weight, bias), at::mm(q_x, q_w.t()) + bias, 1.0 / 128);
  expect_close(fp8_affine_grad_rows(grads, weight), at::mm(q_g, q_w), 1.0 / 256);
  const at::Tensor memory = at::full({80, 96}, 7, at::kBFloat16);
  expect_close(fp8_affine_grad_weight(grads, rows, memory), at::mm(q_g.t(), q_x), 1.0 / 256);
  EXPECT_TRUE(fp8_affine_grad_weight(grads, rows, memory).is_same(memory));
}

// Against bf16, as a layer sees it: the noise of 3 and 2 bits of mantissa over sums of hundreds.
TEST(Fp8, LinearAndMlpStayNearBf16) {
  const at::Tensor x = randn({2, 256, 256}, at::kBFloat16, 1);
  const MlpWeights w{randn({512, 256}, at::kBFloat16, 2) / 16, randn({512}, at::kBFloat16, 3),
                     randn({256, 512}, at::kBFloat16, 4) / 20, randn({256}, at::kBFloat16, 5)};
  const auto mlp = [](Products products) {
    return [products](const Tensors& in) {
      return gelu_tanh_mlp(in[0], {in[1], in[2], in[3], in[4]}, at::kBFloat16, products);
    };
  };
  const Tensors inputs{x, w.weight_1, w.bias_1, w.weight_2, w.bias_2};
  const at::Tensor wanted = mlp(Products::kComputeDtype)(inputs), got = mlp(Products::kFp8)(inputs);
  const auto distance = [](const at::Tensor& a, const at::Tensor& b) {
    const at::Tensor wide = b.to(at::kDouble);
    return ((a.to(at::kDouble) - wide).norm() / wide.norm()).item<double>();
  };
  EXPECT_LT(distance(got, wanted), 0.06);
  EXPECT_GT(distance(got, wanted), 0.005) << "these products did not run in fp8";
  const at::Tensor direction = randn(wanted.sizes(), at::kBFloat16, 6);
  const Tensors wanted_grads = gradients(mlp(Products::kComputeDtype), inputs, direction),
                got_grads = gradients(mlp(Products::kFp8), inputs, direction);
  for (size_t i = 0; i < inputs.size(); ++i) EXPECT_LT(distance(got_grads[i], wanted_grads[i]), 0.15) << i;
}

// Few rows, as of a modulation, or narrow layers stay in bf16, to the bit.
TEST(Fp8, SmallLayersAreLeftAlone) {
  const at::Tensor weight = randn({512, 256}, at::kBFloat16, 2);
  for (const at::Tensor& x : {randn({32, 256}, at::kBFloat16, 1), randn({260, 256}, at::kBFloat16, 1)})
    EXPECT_TRUE(bitwise_equal(linear(x, weight, std::nullopt, at::kBFloat16, Products::kFp8),
                              linear(x, weight, std::nullopt, at::kBFloat16)));
}

TEST(Fp8, RefusesAProcessorInOneLine) {
  EXPECT_EQ(
      message_of([] { require_fp8(at::kCPU, /*emulates=*/false); }),
      "[fp8] --compute-dtype fp8 expects a GPU of compute capability 8.9 or more, got cpu: use bf16, or "
      "--emulate-fp8 to try its arithmetic slowly");
  EXPECT_NO_THROW(require_fp8(at::kCPU, /*emulates=*/true));
}

}  // namespace
}  // namespace kiln::ops
