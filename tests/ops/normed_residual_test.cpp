// adaln_branch and gated_residual_adaln: one pass gives what the ops that they stand for give one after
// another.
#include "ops/checks.h"

namespace kiln::ops {
namespace {

constexpr double kEps = 1e-6;

// Both results, weighted differently, so that each one's gradient matters.
at::Tensor both(const NormedResidual& result) {
  return at::cat({result.x.to(at::kFloat) * 0.3, result.normed.to(at::kFloat)}, 1);
}

struct Case {
  at::ScalarType x_dtype, low;
};

class NormedResiduals : public ::testing::TestWithParam<Case> {
 protected:
  Tensors inputs(int64_t width) const {
    const auto& [x_dtype, low] = GetParam();
    const at::Tensor modulation = randn({3, 3 * width}, low, 3);
    return {randn({3, 37, width}, x_dtype, 1), randn({3, 37, width}, low, 2), modulation};
  }
  static at::Tensor part(const at::Tensor& modulation, int64_t index) {
    const int64_t width = modulation.size(1) / 3;
    return modulation.narrow(1, index * width, width);
  }
  Function fused() const {
    return [low = GetParam().low](const Tensors& in) {
      return both(
          gated_residual_adaln(in[0], part(in[2], 0), in[1], part(in[2], 1), part(in[2], 2), kEps, low));
    };
  }
  Function composed() const {
    return [low = GetParam().low](const Tensors& in) {
      const at::Tensor sum = gated_residual(in[0], part(in[2], 0), in[1]);
      return both({sum, adaln_modulate(sum, part(in[2], 1), part(in[2], 2), kEps, low)});
    };
  }
};

TEST_P(NormedResiduals, AreTheOpsOneAfterAnother) {
  for (const int64_t width : {7, 72, 384}) {
    const Tensors in = inputs(width);
    const at::Tensor direction = randn({3, 74, width}, at::kFloat, 9);
    EXPECT_TRUE(bitwise_equal(fused()(in), composed()(in)));
    const Tensors got = gradients(fused(), in, direction), wanted = gradients(composed(), in, direction);
    const bool is_f32_stream = GetParam().x_dtype == at::kFloat;
    for (size_t i = 0; i < in.size(); ++i) {
      // The sum of both gradients is rounded once where the stream is narrow, as f32 the same bits.
      if (is_f32_stream)
        EXPECT_TRUE(bitwise_equal(got[i], wanted[i])) << i;
      else
        expect_close(got[i], wanted[i], 2 * tolerance_of(GetParam().low));
    }
  }
}

TEST_P(NormedResiduals, ABranchAddsTheGradientThatGoesAround) {
  const auto& [x_dtype, low] = GetParam();
  const Tensors in = {inputs(72)[0], inputs(72)[2]};
  const auto branch = [low = low](const Tensors& t) {
    return both(adaln_branch(t[0], part(t[1], 1), part(t[1], 2), kEps, low));
  };
  const auto apart = [low = low](const Tensors& t) {
    return both({t[0], adaln_modulate(t[0], part(t[1], 1), part(t[1], 2), kEps, low)});
  };
  const at::Tensor direction = randn({3, 74, 72}, at::kFloat, 9);
  const Tensors got = gradients(branch, in, direction), wanted = gradients(apart, in, direction);
  for (size_t i = 0; i < got.size(); ++i)
    expect_close(got[i], wanted[i], x_dtype == at::kFloat ? 1e-6 : 2 * tolerance_of(low));
}

// Whoever reads one result alone gives the other no gradient.
TEST_P(NormedResiduals, OneResultAlone) {
  const Tensors in = inputs(72);
  const auto low = GetParam().low;
  for (const bool reads_x : {true, false}) {
    const auto one = [&](const NormedResidual& r) { return (reads_x ? r.x : r.normed).to(at::kFloat); };
    const auto run = [&](const Tensors& t) {
      return one(gated_residual_adaln(t[0], part(t[2], 0), t[1], part(t[2], 1), part(t[2], 2), kEps, low));
    };
    const auto reference = [&](const Tensors& t) {
      const at::Tensor sum = reference::gated_residual(t[0], part(t[2], 0), t[1]);
      return one({sum, reference::adaln_modulate(sum, part(t[2], 1), part(t[2], 2), kEps, low)});
    };
    const at::Tensor direction = randn({3, 37, 72}, at::kFloat, 9);
    const Tensors got = gradients(run, in, direction), wanted = gradients(reference, in, direction);
    for (size_t i = 0; i < in.size(); ++i) expect_close(got[i], wanted[i], 4 * tolerance_of(low), 1e-6);
  }
}

TEST_P(NormedResiduals, MetaAndThreads) {
  expect_meta_agrees(fused(), inputs(24));
  expect_thread_count_does_not_matter(fused(), inputs(24));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, NormedResiduals,
                         ::testing::Values(Case{at::kFloat, at::kFloat}, Case{at::kFloat, at::kBFloat16},
                                           Case{at::kBFloat16, at::kBFloat16}));

TEST(NormedResidual, GradientsInF64) {
  const at::Tensor modulation = randn({2, 15});
  gradcheck(
      [](const Tensors& in) {
        const auto part = [&](int64_t i) { return in[2].narrow(1, 5 * i, 5); };
        const NormedResidual r =
            gated_residual_adaln(in[0], part(0), in[1], part(1), part(2), 1e-5, at::kDouble);
        return at::cat({r.x * 0.3, r.normed}, 1);
      },
      {randn({2, 3, 5}, at::kDouble, 1), randn({2, 3, 5}, at::kDouble, 2), modulation});
}

}  // namespace
}  // namespace kiln::ops
