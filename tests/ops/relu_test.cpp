#include "ops/relu.h"

#include <limits>

#include "ops/checks.h"

namespace kiln::ops {
namespace {

using testing::kBf16;
using testing::kF32;
using testing::kFp16;
using testing::Tensors;

at::Tensor first_relu(const Tensors& in) { return ops::relu(in[0]); }

class Relu : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(Relu, EqualsTheReferenceAndATen) {
  at::Tensor x = testing::randn({3, 17, 5}, GetParam());
  x.view(-1).narrow(0, 0, 4).zero_();
  x.view(-1)[5] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(at::equal(ops::relu(x), reference::relu(x)));
  EXPECT_TRUE(at::equal(ops::relu(x), x.relu()));
  const at::Tensor direction = testing::randn({3, 17, 5}, GetParam(), 2);
  const at::Tensor got = testing::gradients(first_relu, {x}, direction)[0];
  const auto of_aten = [](const Tensors& in) { return in[0].relu(); };
  EXPECT_TRUE(at::equal(got, testing::gradients(of_aten, {x}, direction)[0]));
  EXPECT_EQ(got.view(-1).narrow(0, 0, 4).count_nonzero().item<int64_t>(), 0) << "the gradient at 0";
}

TEST_P(Relu, MetaAgrees) {
  const at::Tensor x = testing::randn({2, 6, 4, 3}, GetParam());
  testing::expect_meta_agrees(first_relu, {x});
  testing::expect_meta_agrees(first_relu, {x.contiguous(at::MemoryFormat::ChannelsLast)});
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Relu, ::testing::Values(kF32, kBf16, kFp16));

TEST(ReluOp, NanStaysNan) {
  const at::Tensor nan = at::full({3}, std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(ops::relu(nan).isnan().all().item<bool>());
  EXPECT_TRUE(reference::relu(nan).isnan().all().item<bool>());
}

TEST(ReluOp, GradcheckInF64) { testing::gradcheck(first_relu, {testing::randn({3, 5})}); }

}  // namespace
}  // namespace kiln::ops
