// conv2d where a CPU only stores the compute dtype: results and gradients.
#include "ops/checks.h"

namespace kiln::ops {
namespace {

constexpr ConvolutionShape kShape{.stride = 2, .padding = 1, .groups = 1};

struct Operands {
  at::Tensor x = randn({2, 8, 9, 9}, at::kFloat, 1).requires_grad_();
  at::Tensor weight = randn({12, 8, 3, 3}, at::kFloat, 2).requires_grad_();
  at::Tensor bias = randn({12}, at::kFloat, 3).requires_grad_();
};

// Casts to the stored dtype and back, and convolves in f32.
at::Tensor composed(const Operands& in, at::ScalarType stored) {
  const auto cast = [&](const at::Tensor& tensor) { return tensor.to(stored).to(at::kFloat); };
  return at::conv2d(cast(in.x), cast(in.weight), cast(in.bias), {2, 2}, {1, 1}).to(stored);
}

TEST(Convolution, InStoredDtypeIsThatOfF32) {
  const Operands fused, slow;
  const at::Tensor y = conv2d(fused.x, fused.weight, fused.bias, kShape, at::kHalf),
                   want = composed(slow, at::kHalf), grad = randn({2, 12, 5, 5}, at::kHalf, 4);
  EXPECT_EQ(y.scalar_type(), at::kHalf);
  EXPECT_TRUE(at::equal(y, want));
  y.backward(grad);
  want.backward(grad);
  EXPECT_TRUE(at::equal(fused.x.grad(), slow.x.grad()));
  EXPECT_TRUE(at::equal(fused.weight.grad(), slow.weight.grad()));
  EXPECT_TRUE(at::equal(fused.bias.grad(), slow.bias.grad()));
}

TEST(Convolution, FrozenPassesTheGradientOn) {
  const Operands trained;
  Operands frozen;
  frozen.weight = trained.weight.detach();
  frozen.bias = trained.bias.detach();
  const at::Tensor grad = randn({2, 12, 5, 5}, at::kHalf, 4);
  for (const at::ScalarType dtype : {at::kHalf, at::kFloat}) {
    trained.x.mutable_grad() = at::Tensor();
    frozen.x.mutable_grad() = at::Tensor();
    conv2d(trained.x, trained.weight, trained.bias, kShape, dtype).backward(grad.to(dtype));
    conv2d(frozen.x, frozen.weight, frozen.bias, kShape, dtype).backward(grad.to(dtype));
    EXPECT_TRUE(at::equal(trained.x.grad(), frozen.x.grad())) << dtype;
  }
}

}  // namespace
}  // namespace kiln::ops
