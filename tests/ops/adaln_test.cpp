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

at::Tensor modulated_in_f64(const Tensors& in, double eps = 1e-6) {
  const Tensors wide = in_f64(in);
  return reference::adaln_modulate(wide[0], wide[1], wide[2], eps, at::kDouble);
}

TEST_P(Adaln, ResultAndGradientsMatchF64Reference) {
  const AdalnCase c = GetParam();
  const Tensors inputs = inputs_of(c);
  EXPECT_EQ(modulate(c.out)(inputs).scalar_type(), c.out);
  // A row of one element has no gradient but rounding: 1 / sqrt(eps) of it.
  expect_equals_reference(modulate(c.out), [](const Tensors& in) { return modulated_in_f64(in); }, inputs,
                          {.atol = c.width == 1 ? 1e-2 : 1e-5, .seed = 3});
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
            in_f64({randn({2, 3, 5}, kF32, 1), randn({2, 5}, kF32, 2), randn({2, 5}, kF32, 3)}));
}

TEST(AdalnModulate, KeepsDigitsWhenTheMeanIsFarFromZero) {
  const Tensors in = {(randn({2, 4, 96}) + 1000).to(kF32), randn({2, 96}, kF32, 2), randn({2, 96}, kF32, 3)};
  expect_close(modulate(kF32)(in), modulated_in_f64(in), 1e-4);
}

TEST(AdalnModulate, EpsCountsForSmallActivations) {
  const at::Tensor x = randn({1, 4, 64}, kF32) * 1e-3, zero = at::zeros({1, 64});
  for (double eps : {1e-5, 1e-6})
    expect_close(modulate(kF32, eps)({x, zero, zero}), modulated_in_f64({x, zero, zero}, eps), 1e-5);
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
