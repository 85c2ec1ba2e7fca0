#include <limits>

#include "ops/checks.h"

namespace kiln::ops {
namespace {

struct GatedCase {
  int64_t batch, tokens, width;
  at::ScalarType residual, branch;
};

class GatedResidual : public ::testing::TestWithParam<GatedCase> {};

at::Tensor gated(const Tensors& in) { return gated_residual(in[0], in[1], in[2]); }
at::Tensor composed_gated(const Tensors& in) { return reference::gated_residual(in[0], in[1], in[2]); }

Tensors inputs_of(const GatedCase& c) {
  return {randn({c.batch, c.tokens, c.width}, c.residual, 1),
          randn({c.batch, 6 * c.width}, c.branch, 2).narrow(1, 2 * c.width, c.width),
          randn({c.batch, c.tokens, c.width}, c.branch, 3)};
}

TEST_P(GatedResidual, ResultAndGradientsMatchF64Reference) {
  EXPECT_EQ(gated(inputs_of(GetParam())).scalar_type(), GetParam().residual);
  expect_equals_reference(gated, composed_gated, inputs_of(GetParam()));
}

TEST_P(GatedResidual, MetaAgrees) { expect_meta_agrees(gated, inputs_of(GetParam())); }

TEST_P(GatedResidual, ThreadCountDoesNotMatter) {
  expect_thread_count_does_not_matter(gated, inputs_of(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Shapes, GatedResidual,
                         ::testing::Values(GatedCase{1, 1, 1, kF32, kF32}, GatedCase{2, 3, 7, kF32, kBf16},
                                           GatedCase{3, 33, 72, kF32, kBf16},
                                           GatedCase{2, 100, 384, kF32, kBf16},
                                           GatedCase{1, 64, 1152, kF32, kFp16},
                                           GatedCase{2, 40, 50, kBf16, kBf16},
                                           GatedCase{2, 40, 19, kFp16, kF32}));

TEST(GatedResidualOp, GradcheckInF64) {
  gradcheck(gated, {randn({2, 3, 4}, at::kDouble, 1), randn({2, 4}, at::kDouble, 2),
                    randn({2, 3, 4}, at::kDouble, 3)});
}

TEST(GatedResidualOp, GradientOfXIsTheIncomingTensor) {
  const Tensors inputs = inputs_of(GatedCase{2, 5, 16, kF32, kBf16});
  const at::Tensor x = leaf(inputs[0]);
  const at::Tensor grad = randn(x.sizes(), kF32, 5);
  const at::Tensor dx = torch::autograd::grad({gated({x, inputs[1], inputs[2]})}, {x}, {grad})[0];
  EXPECT_EQ(dx.data_ptr(), grad.data_ptr());
}

// The gradient of the branch is the incoming one where the gate is 1, stored in bf16.
TEST(GatedResidualOp, StoresBf16RoundedToEven) {
  constexpr int64_t kWidth = 19;
  at::Tensor bits = at::arange(0, 400 * kWidth, at::kLong).mul(0x8000 + 0x10001 * 7).to(at::kInt);
  bits.slice(0, 0, 200).copy_(at::arange(0, 200, at::kInt).mul(0x8000) + 0x3f800000);  // ties
  bits.slice(0, 200, 203).copy_(at::tensor({0x7f7fffff, 0x7f800000, 0x7f800001}, at::kInt));
  at::Tensor grad = bits.view(at::kFloat).clone().view({2, 200, kWidth});
  grad.masked_fill_(grad.abs() < std::numeric_limits<float>::min(), 0);  // denormals may become 0
  const at::Tensor branch = leaf(at::zeros({2, 200, kWidth}, kBf16));
  const at::Tensor out = gated({at::zeros_like(grad), at::ones({2, kWidth}), branch});
  const at::Tensor stored = torch::autograd::grad({out}, {branch}, {grad})[0], exact = grad.to(kBf16);
  EXPECT_TRUE(stored.isnan().equal(exact.isnan()));
  EXPECT_TRUE(bitwise_equal(stored.masked_fill(stored.isnan(), 0), exact.masked_fill(exact.isnan(), 0)));
}

TEST(GatedResidualOp, NonFiniteValuesPropagate) {
  Tensors inputs = inputs_of(GatedCase{1, 3, 20, kF32, kBf16});
  inputs[2][0][1][19] = std::numeric_limits<float>::infinity();
  inputs[0][0][2][3] = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor bad = gated(inputs).isfinite().logical_not();
  EXPECT_EQ(bad.sum().item<int64_t>(), 2);
  EXPECT_TRUE(bad[0][1][19].item<bool>() && bad[0][2][3].item<bool>());
}

TEST(GatedResidualOp, NamesWhatIsWrong) {
  const at::Tensor x = at::zeros({2, 3, 4});
  const auto message = [&](const at::Tensor& gate, const at::Tensor& y) {
    return message_of([&] { gated_residual(x, gate, y); });
  };
  EXPECT_THAT(message(at::zeros({2, 3}), x), HasSubstr("[gated_residual] gate must have shape [2, 4]"));
  EXPECT_THAT(message(at::zeros({2, 4}), at::zeros({2, 3, 5})),
              HasSubstr("y must have the shape of x [2, 3, 4], got [2, 3, 5]"));
}

}  // namespace
}  // namespace kiln::ops
