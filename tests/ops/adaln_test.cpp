#include <limits>

#include "ops/checks.h"

namespace kiln::ops {
namespace {

struct AdalnCase {
  int64_t batch, tokens, width;
  at::ScalarType x, modulation, out;
};

class Adaln : public ::testing::TestWithParam<AdalnCase> {};

Function modulate(at::ScalarType out, double eps = 1e-6) {
  return [=](const Tensors& in) { return adaln_modulate(in[0], in[1], in[2], eps, out); };
}

Tensors inputs_of(const AdalnCase& c) {
  const at::Tensor x = randn({c.batch, c.tokens, c.width}, at::kDouble, 1) * 2 + 0.5;
  const at::Tensor chunks = randn({c.batch, 6 * c.width}, c.modulation, 2);
  return {x.to(c.x), chunks.narrow(1, 0, c.width), chunks.narrow(1, c.width, c.width)};
}

Tensors wide(const Tensors& inputs) {
  Tensors result;
  for (const at::Tensor& input : inputs) {
    result.push_back(input.to(at::kDouble));
  }
  return result;
}

TEST_P(Adaln, ResultAndGradientsMatchF64Reference) {
  const AdalnCase c = GetParam();
  const Tensors inputs = inputs_of(c);
  const at::Tensor out = adaln_modulate(inputs[0], inputs[1], inputs[2], 1e-6, c.out);
  EXPECT_EQ(out.scalar_type(), c.out);
  const auto reference = [](const Tensors& in) {
    return reference::adaln_modulate(in[0], in[1], in[2], 1e-6, at::kDouble);
  };
  expect_close(out, reference(wide(inputs)), tolerance_of(c.out));
  // The direction is rounded to the result's dtype first: both then see the same gradient.
  const at::Tensor direction = randn(out.sizes(), c.out, 3);
  const Tensors got = gradients(modulate(c.out), inputs, direction);
  const Tensors expected = gradients(reference, wide(inputs), direction.to(at::kDouble));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(got[i].scalar_type(), inputs[i].scalar_type());
    // A row of one element has no gradient but rounding: 1 / sqrt(eps) of it.
    expect_close(got[i], expected[i], tolerance_of(inputs[i].scalar_type()), c.width == 1 ? 1e-2 : 1e-5);
  }
}

TEST_P(Adaln, MetaAgrees) { expect_meta_agrees(modulate(GetParam().out), inputs_of(GetParam())); }

TEST_P(Adaln, ThreadCountDoesNotMatter) {
  expect_thread_count_does_not_matter(modulate(GetParam().out), inputs_of(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Adaln,
    ::testing::Values(AdalnCase{1, 1, 1, kF32, kF32, kF32}, AdalnCase{2, 3, 7, kF32, kBf16, kBf16},
                      AdalnCase{3, 33, 72, kF32, kBf16, kBf16}, AdalnCase{2, 100, 384, kF32, kF32, kBf16},
                      AdalnCase{1, 64, 1152, kF32, kBf16, kBf16}, AdalnCase{2, 5, 72, kBf16, kBf16, kBf16},
                      AdalnCase{4, 40, 19, kF32, kFp16, kFp16}, AdalnCase{2, 40, 72, kBf16, kF32, kF32},
                      AdalnCase{2, 9, 30, kFp16, kFp16, kF32}, AdalnCase{2, 9, 30, kFp16, kF32, kFp16}));

TEST(AdalnModulate, GradcheckInF64) {
  gradcheck(modulate(at::kDouble),
            wide({randn({2, 3, 5}, kF32, 1), randn({2, 5}, kF32, 2), randn({2, 5}, kF32, 3)}));
}

TEST(AdalnModulate, KeepsDigitsWhenTheMeanIsFarFromZero) {
  const at::Tensor x = (randn({2, 4, 96}) + 1000).to(kF32);
  const at::Tensor shift = randn({2, 96}, kF32, 2), scale = randn({2, 96}, kF32, 3);
  const at::Tensor expected = reference::adaln_modulate(x.to(at::kDouble), shift.to(at::kDouble),
                                                        scale.to(at::kDouble), 1e-6, at::kDouble);
  expect_close(adaln_modulate(x, shift, scale, 1e-6, kF32), expected, 1e-4);
}

TEST(AdalnModulate, EpsCountsForSmallActivations) {
  const at::Tensor x = randn({1, 4, 64}, kF32) * 1e-3;
  const at::Tensor zero = at::zeros({1, 64});
  for (double eps : {1e-5, 1e-6}) {
    const at::Tensor expected = reference::adaln_modulate(x.to(at::kDouble), zero.to(at::kDouble),
                                                          zero.to(at::kDouble), eps, at::kDouble);
    expect_close(adaln_modulate(x, zero, zero, eps, kF32), expected, 1e-5);
  }
}

TEST(AdalnModulate, NonFiniteInputSpoilsItsRowAlone) {
  for (float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    at::Tensor x = randn({1, 3, 40}, kF32);
    x[0][1][39] = bad;
    const at::Tensor zero = at::zeros({1, 40});
    const at::Tensor finite = adaln_modulate(x, zero, zero, 1e-6, kBf16).isfinite();
    EXPECT_TRUE(finite[0][0].all().item<bool>() && finite[0][2].all().item<bool>());
    EXPECT_FALSE(finite[0][1].any().item<bool>());
  }
}

TEST(AdalnModulate, ReadsTransposedInputs) {
  const at::Tensor x = randn({8, 3, 2}, kF32).permute({2, 1, 0});
  const at::Tensor rows = randn({8, 2}, kF32, 2).t();
  expect_close(adaln_modulate(x, rows, rows, 1e-6, kF32),
               reference::adaln_modulate(x, rows, rows, 1e-6, kF32), 1e-6);
}

TEST(AdalnModulate, NamesWhatIsWrong) {
  const at::Tensor x = at::zeros({2, 3, 4}), rows = at::zeros({2, 4});
  const auto message = [&](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
    return message_of([&] { adaln_modulate(a, b, c, 1e-6, kF32); });
  };
  EXPECT_THAT(message(x[0], rows, rows), HasSubstr("[adaln_modulate] x must have 3 dimensions"));
  EXPECT_THAT(message(x, at::zeros({2, 5}), rows), HasSubstr("shift must have shape [2, 4]"));
  EXPECT_THAT(message(x, rows, at::zeros({1, 4})), HasSubstr("scale must have shape [2, 4]"));
  EXPECT_THAT(message(x, rows, rows.to(kBf16)), HasSubstr("one dtype"));
}

}  // namespace
}  // namespace kiln::ops
