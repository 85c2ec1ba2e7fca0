#include "ops/checks.h"

namespace kiln::ops {
namespace {

struct GluCase {
  int64_t batch, height, width, channels;
  at::ScalarType dtype;
};

class GluConv : public ::testing::TestWithParam<GluCase> {};

Tensors glu_inputs(const GluCase& c, at::ScalarType dtype) {
  return {randn({c.batch, c.height * c.width, 2 * c.channels}, c.dtype, 1).to(dtype),
          randn({2 * c.channels, 1, 3, 3}, c.dtype, 2).to(dtype),
          randn({2 * c.channels}, c.dtype, 3).to(dtype)};
}

Function gated(const GluCase& c) {
  return [=](const Tensors& in) { return glu_depthwise_conv(in[0], in[1], in[2], c.height, c.width); };
}

Function by_reference(const GluCase& c) {
  return [=](const Tensors& in) {
    return reference::glu_depthwise_conv(in[0], in[1], in[2], c.height, c.width);
  };
}

// Pixel by pixel.
at::Tensor pixelwise(const GluCase& c, const Tensors& in) {
  const at::Tensor activated = at::silu(in[0]).view({c.batch, c.height, c.width, 2 * c.channels});
  at::Tensor sums = in[2].expand_as(activated).clone();
  for (int64_t y = 0; y < c.height; ++y)
    for (int64_t x = 0; x < c.width; ++x)
      for (int64_t dy = -1; dy <= 1; ++dy)
        for (int64_t dx = -1; dx <= 1; ++dx) {
          if (y + dy < 0 || y + dy >= c.height || x + dx < 0 || x + dx >= c.width) continue;
          const at::Tensor tap = in[1].select(1, 0).select(1, dy + 1).select(1, dx + 1);
          sums.select(1, y).select(1, x).add_(activated.select(1, y + dy).select(1, x + dx) * tap);
        }
  return (sums.narrow(3, 0, c.channels) * at::silu(sums.narrow(3, c.channels, c.channels))).flatten(1, 2);
}

TEST_P(GluConv, EqualsTheDefinitionPixelByPixel) {
  const GluCase c = GetParam();
  const at::Tensor out = gated(c)(glu_inputs(c, c.dtype));
  EXPECT_EQ(out.scalar_type(), c.dtype);
  expect_close(out, pixelwise(c, glu_inputs(c, at::kDouble)), tolerance_of(c.dtype));
}

TEST_P(GluConv, GradientsEqualTheReferenceInF64) {
  const GluCase c = GetParam();
  expect_equals_reference(gated(c), by_reference(c), glu_inputs(c, c.dtype), {.gradients = 2});
  expect_equals_reference(gated(c), by_reference(c), glu_inputs(c, at::kDouble), {.atol = 1e-12});
}

TEST_P(GluConv, MetaAgrees) {
  expect_meta_agrees(gated(GetParam()), glu_inputs(GetParam(), GetParam().dtype));
}

TEST_P(GluConv, HasABackwardInADryRunOfCuda) {
  expect_gradients_in_a_dry_run_of_cuda(gated(GetParam()), glu_inputs(GetParam(), GetParam().dtype));
}

TEST_P(GluConv, ThreadCountDoesNotMatter) {
  expect_thread_count_does_not_matter(gated(GetParam()), glu_inputs(GetParam(), GetParam().dtype));
}

INSTANTIATE_TEST_SUITE_P(Shapes, GluConv,
                         ::testing::Values(GluCase{2, 5, 7, 80, kF32}, GluCase{1, 1, 1, 3, kF32},
                                           GluCase{2, 8, 3, 64, kBf16}, GluCase{1, 2, 9, 37, kBf16},
                                           GluCase{3, 4, 4, 16, kFp16}, GluCase{1, 1, 6, 130, kF32}));

TEST(GluDepthwiseConv, GradcheckInF64) {
  const GluCase c = {2, 3, 2, 2, at::kDouble};
  gradcheck(gated(c), glu_inputs(c, at::kDouble));
}

TEST(GluDepthwiseConv, WeightsMayHaveAnotherDtype) {
  const GluCase c = {1, 3, 4, 8, kF32};
  Tensors inputs = glu_inputs(c, kF32);
  const Tensors rounded = {inputs[0].to(kBf16), inputs[1], inputs[2]};
  const Tensors got = gradients(gated(c), rounded, at::ones({1, 12, 8}));
  EXPECT_EQ(got[0].scalar_type(), kBf16);
  EXPECT_EQ(got[1].scalar_type(), kF32);
}

TEST(GluDepthwiseConv, NamesWhatIsWrong) {
  const at::Tensor h = at::zeros({1, 6, 4}), weight = at::zeros({4, 1, 3, 3}), bias = at::zeros({4});
  const auto message = [&](const at::Tensor& taps, int64_t width) {
    return message_of([&] { glu_depthwise_conv(h, taps, bias, 2, width); });
  };
  EXPECT_THAT(message(weight, 4), HasSubstr("[glu_depthwise_conv] expected h (B, 2 * 4, 2C)"));
  EXPECT_THAT(message(at::zeros({4, 1, 5, 5}), 3), HasSubstr("got (1, 6, 4), (4, 1, 5, 5) and (4)"));
}

}  // namespace
}  // namespace kiln::ops
