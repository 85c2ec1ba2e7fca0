#include "ops/mixed_sum.h"

#include "core/allocations.h"
#include "ops/checks.h"

namespace kiln::ops {
namespace {

struct MixedSumCase {
  std::vector<int64_t> a_sizes, b_sizes;
  at::ScalarType a, b, sum;
};

class MixedSum : public ::testing::TestWithParam<MixedSumCase> {
 protected:
  Tensors inputs() const {
    return {randn(GetParam().a_sizes, GetParam().a, 1), randn(GetParam().b_sizes, GetParam().b, 2)};
  }
};

at::Tensor mixed(const Tensors& in) { return mixed_sum(in[0], in[1]); }

TEST_P(MixedSum, IsTheSumInTheWiderDtype) {
  const Tensors in = inputs();
  const at::Tensor sum = mixed(in);
  EXPECT_EQ(sum.scalar_type(), GetParam().sum);
  const at::Tensor exact = in[0].to(at::kDouble) + in[1].to(at::kDouble);
  EXPECT_TRUE(bitwise_equal(sum, exact.to(GetParam().sum)));
}

TEST_P(MixedSum, MetaAgrees) { expect_meta_agrees(mixed, inputs()); }

INSTANTIATE_TEST_SUITE_P(Shapes, MixedSum,
                         ::testing::Values(MixedSumCase{{2, 3, 7}, {2, 3, 7}, kF32, kF32, kF32},
                                           MixedSumCase{{2, 16, 48}, {1, 16, 48}, kBf16, kF32, kF32},
                                           MixedSumCase{{1, 16, 48}, {2, 16, 48}, kF32, kFp16, kF32},
                                           MixedSumCase{{1}, {1}, kFp16, kF32, kF32},
                                           MixedSumCase{{0, 4}, {1, 4}, kBf16, kF32, kF32},
                                           MixedSumCase{{3, 5}, {3, 5}, at::kDouble, kF32, at::kDouble},
                                           MixedSumCase{{4, 4}, {4, 4}, kBf16, kBf16, kBf16}));

TEST(MixedSumOp, GradcheckInF64) {
  gradcheck(mixed, {randn({2, 3, 4}, at::kDouble, 1), randn({1, 3, 4}, at::kDouble, 2)});
}

// Each operand's gradient has its own dtype and, where it was broadcast, its own size.
TEST(MixedSumOp, GradientsAreTheIncomingOne) {
  const at::Tensor a = randn({3, 2, 5}, kBf16, 1), b = randn({1, 2, 5}, kF32, 2);
  const at::Tensor direction = randn({3, 2, 5}, kF32, 3);
  const Tensors got = gradients(mixed, {a, b}, direction);
  EXPECT_TRUE(bitwise_equal(got[0], direction.to(kBf16)));
  EXPECT_EQ(got[1].scalar_type(), kF32);
  expect_close(got[1], direction.sum(0, /*keepdim=*/true), 1e-6);
}

TEST(MixedSumOp, KeepsTheStridesOfATransposedOperand) {
  const Tensors in = {randn({5, 3}, kBf16, 1).t(), randn({5, 3}, kF32, 2).t()};
  expect_meta_agrees(mixed, in);
  EXPECT_EQ(mixed(in).strides(), in[0].strides());
}

TEST(MixedAdd, AddsInPlaceInTheWiderDtype) {
  for (const at::ScalarType dtype : {kF32, kBf16, kFp16}) {
    const at::Tensor start = randn({7, 9}, kF32, 1), term = randn({7, 9}, dtype, 2);
    at::Tensor sum = start.clone();
    const void* data = sum.const_data_ptr();
    mixed_add_(sum, term);
    EXPECT_EQ(sum.const_data_ptr(), data);
    EXPECT_TRUE(bitwise_equal(sum, (start.to(at::kDouble) + term.to(at::kDouble)).to(kF32)));
  }
}

// What a dry run of a CPU sees is what the CPU takes, the wider copy of the narrower operand included.
TEST(MixedSumOp, ADryRunAllocatesWhatTheCpuDoes) {
  install_tracking_cpu_allocator();
  const auto work = [](at::Device device, at::ScalarType narrow) {
    const at::Tensor a = at::zeros({64, 256}, at::TensorOptions(device).dtype(narrow));
    const at::Tensor b = at::zeros({64, 256}, at::TensorOptions(device).dtype(kF32));
    at::Tensor sum = mixed_sum(a, b);
    mixed_add_(sum, a);
  };
  const DryRunScope dry_run(DryRunDevice::kCpu);
  for (const at::ScalarType narrow : {kF32, kBf16, kFp16}) {
    MetaMeter planned;
    {
      const MetaAllocationScope scope(planned);
      work(at::kMeta, narrow);
    }
    const int64_t before = live_cpu_bytes().live;
    reset_peak_cpu_bytes();
    work(at::kCPU, narrow);
    EXPECT_EQ(live_cpu_bytes().peak - before, planned.peak) << c10::toString(narrow);
  }
}

}  // namespace
}  // namespace kiln::ops
