#include <limits>

#include "core/allocations.h"
#include "ops/checks.h"
#include "ops/op_recorder.h"

namespace kiln::ops {
namespace {

struct GroupNormCase {
  int64_t batch, channels, height, width, groups;
  at::ScalarType dtype;
  at::MemoryFormat format;
  bool silu;
};

class GroupNorm : public ::testing::TestWithParam<GroupNormCase> {};

Tensors inputs_of(const GroupNormCase& c) {
  const at::Tensor x = randn({c.batch, c.channels, c.height, c.width}, at::kDouble, 1) * 3 + 1;
  return {x.to(c.dtype).contiguous(c.format), randn({c.channels}, at::kFloat, 2),
          randn({c.channels}, at::kFloat, 3)};
}

Function normed(const GroupNormCase& c) {
  return [=](const Tensors& in) { return group_norm_silu(in[0], c.groups, in[1], in[2], 1e-6, c.silu); };
}

TEST_P(GroupNorm, MatchesATenInF64) {
  const GroupNormCase c = GetParam();
  const Tensors inputs = inputs_of(c), wide = in_f64(inputs);
  const at::Tensor out = normed(c)(inputs);
  at::Tensor expected = at::group_norm(wide[0], c.groups, wide[1], wide[2], 1e-6);
  expected = c.silu ? at::silu(expected) : expected;
  EXPECT_EQ(out.scalar_type(), c.dtype);
  EXPECT_EQ(out.strides(), inputs[0].strides());
  expect_close(out, expected, tolerance_of(c.dtype));
}

TEST_P(GroupNorm, GradientsMatchF64) {
  // ATen's, which contiguous tensors have, are rounded to their dtype at each operation on the way.
  if (GetParam().format == at::MemoryFormat::Contiguous && GetParam().dtype != kF32) return;
  expect_equals_reference(normed(GetParam()), normed(GetParam()), inputs_of(GetParam()), {.gradients = 4});
}

TEST_P(GroupNorm, MetaAgrees) { expect_meta_agrees(normed(GetParam()), inputs_of(GetParam())); }

TEST_P(GroupNorm, HasABackwardInADryRunOfCuda) {
  expect_gradients_in_a_dry_run_of_cuda(normed(GetParam()), inputs_of(GetParam()));
}

TEST_P(GroupNorm, ThreadCountDoesNotMatter) {
  const Tensors inputs = inputs_of(GetParam());
  if (GetParam().format == at::MemoryFormat::ChannelsLast)
    return expect_thread_count_does_not_matter(normed(GetParam()), inputs);
  const at::NoGradGuard no_grad;  // ATen's backward
  expect_same_bits_on_threads([&] { return Tensors{normed(GetParam())(inputs)}; });
}

constexpr auto kDense = at::MemoryFormat::Contiguous, kLast = at::MemoryFormat::ChannelsLast;
INSTANTIATE_TEST_SUITE_P(Shapes, GroupNorm,
                         ::testing::Values(GroupNormCase{2, 64, 9, 7, 32, kF32, kDense, true},
                                           GroupNormCase{2, 64, 9, 7, 32, kF32, kLast, true},
                                           GroupNormCase{1, 128, 40, 40, 32, kBf16, kDense, true},
                                           GroupNormCase{2, 128, 40, 40, 32, kBf16, kLast, true},
                                           GroupNormCase{1, 96, 5, 3, 8, kFp16, kLast, false},
                                           GroupNormCase{1, 30, 70, 64, 3, kF32, kLast, false},
                                           GroupNormCase{3, 6, 64, 70, 2, kF32, kDense, false},
                                           GroupNormCase{1, 5, 1, 3, 1, kF32, kDense, true}));

TEST(GroupNormSilu, GradcheckInF64) {
  gradcheck([](const Tensors& in) { return group_norm_silu(in[0], 2, in[1], in[2], 1e-6, true); },
            {randn({2, 4, 2, 3}), randn({4}, at::kDouble, 2), randn({4}, at::kDouble, 3)});
}

TEST(GroupNormSilu, GradientsKeepDigitsWhenTheMeanIsFarFromZero) {
  const GroupNormCase c = {1, 8, 50, 50, 2, kF32, kLast, false};
  Tensors inputs = inputs_of(c);
  inputs[0] = inputs[0] + 300;
  expect_equals_reference(normed(c), normed(c), inputs, {.result = 4, .gradients = 10});
}

// A norm whose x needs no gradient, as in the first segment that is trained.
TEST(GroupNormSilu, GivesWeightsAloneTheirGradients) {
  const GroupNormCase c = {2, 16, 6, 5, 4, kF32, kLast, true};
  const Tensors inputs = inputs_of(c), leaves = {inputs[0], leaf(inputs[1]), leaf(inputs[2])};
  const at::Tensor out = normed(c)(leaves), direction = randn(out.sizes(), kF32, 4);
  const Tensors all = gradients(normed(c), inputs, direction);
  expect_same_bits(torch::autograd::grad({out}, {leaves[1], leaves[2]}, {direction}), {all[1], all[2]});
}

TEST(GroupNormSilu, KeepsDigitsWhenTheMeanIsFarFromZero) {
  for (auto format : {kDense, kLast}) {
    const at::Tensor x = (randn({1, 8, 50, 50}) + 300).to(kF32).contiguous(format);
    const at::Tensor one = at::ones({8}), zero = at::zeros({8});
    const at::Tensor expected =
        at::group_norm(x.to(at::kDouble), 2, one.to(at::kDouble), zero.to(at::kDouble), 1e-6);
    expect_close(group_norm_silu(x, 2, one, zero, 1e-6, false), expected, 2e-5);
  }
}

TEST(GroupNormSilu, EpsCountsForSmallActivations) {
  const at::Tensor x = randn({1, 8, 5, 5}, kF32) * 1e-3;
  const at::Tensor one = at::ones({8}), zero = at::zeros({8});
  for (double eps : {1e-5, 1e-6}) {
    expect_close(group_norm_silu(x, 2, one, zero, eps, false), at::group_norm(x, 2, one, zero, eps), 1e-5);
  }
}

TEST(GroupNormSilu, NanSpoilsItsGroupAlone) {
  for (auto format : {kDense, kLast}) {
    at::Tensor x = randn({1, 8, 5, 5}, kF32).contiguous(format);
    x[0][2][4][4] = std::numeric_limits<float>::quiet_NaN();
    const at::Tensor finite = group_norm_silu(x, 4, at::ones({8}), at::zeros({8}), 1e-6, true).isfinite();
    EXPECT_FALSE(finite.narrow(1, 2, 2).any().item<bool>());
    EXPECT_EQ(finite.sum().item<int64_t>(), 6 * 25);
  }
}

class LargeAllocations : public AllocationObserver {
 public:
  explicit LargeAllocations(size_t least_bytes) : least_bytes_(least_bytes) {}
  void allocated(uint64_t, size_t bytes) override { count += bytes >= least_bytes_; }
  void freed(uint64_t, size_t) override {}
  int count = 0;

 private:
  size_t least_bytes_;
};

// On a GPU a channels-last picture is normalised as it lies. Each pass reads it twice: for sums, then for the
// result.
TEST(GroupNormSilu, APlanOfAGpuHasNoCopyOfAPicture) {
  const DryRunScope dry_run(DryRunDevice::kCuda);
  const auto options = at::TensorOptions(at::kMeta).dtype(kBf16);
  const at::Tensor x = at::empty({2, 64, 32, 32}, options, kLast).requires_grad_();
  const at::Tensor weight = at::empty({64}, options).requires_grad_(), bias = at::empty_like(weight);
  LargeAllocations pictures(x.nbytes());
  OpRecorder recorder(/*timed=*/false);
  const MetaAllocationScope scope(pictures);
  const at::Tensor out = group_norm_silu(x, 32, weight, bias, 1e-6, true);
  EXPECT_EQ(pictures.count, 1);
  const Tensors grads = torch::autograd::grad({out}, {x, weight}, {out.detach()});
  EXPECT_EQ(pictures.count, 2);
  EXPECT_TRUE(grads[0].is_contiguous(kLast));
  const std::vector<OpRecord> ops = recorder.take();
  ASSERT_EQ(ops.size(), 2U);
  EXPECT_EQ(ops[0].name, "kiln::group_norm_silu");
  EXPECT_NEAR(ops[0].bytes, 3.0 * static_cast<double>(x.nbytes()), 1e3);
  EXPECT_EQ(ops[1].name, "kiln::group_norm_silu_backward");
  EXPECT_NEAR(ops[1].bytes, 5.0 * static_cast<double>(x.nbytes()), 2e3);
}

TEST(GroupNormSilu, NamesWhatIsWrong) {
  const at::Tensor x = at::zeros({1, 6, 2, 2}), affine = at::ones({6});
  EXPECT_ERROR(group_norm_silu(x, 4, affine, affine, 1e-6, true),
               "[group_norm_silu] the number of groups must divide the 6 channels, got 4");
  EXPECT_ERROR(group_norm_silu(x, 3, at::ones({5}), affine, 1e-6, true),
               "weight and bias must have 6 elements, got 5 and 6");
  EXPECT_ERROR(group_norm_silu(x[0], 3, affine, affine, 1e-6, true), "4 dimensions");
}

}  // namespace
}  // namespace kiln::ops
