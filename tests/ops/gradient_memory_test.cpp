// Weight gradients are made where they are kept: no product of the backward is copied into the flat views.

#include "ops/gradient_memory.h"
#include "ops/checks.h"

namespace kiln::ops {
namespace {

TEST(GradientMemory, BackwardWritesWhatWasLent) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor x = randn({70, 24}, dtype, 1), weight = leaf(randn({40, 24}, dtype, 2)),
                     bias = leaf(randn({40}, dtype, 3)), second = leaf(randn({8, 40}, dtype, 4));
    const auto gradients = [&] {
      const at::Tensor hidden = linear(x, weight, bias, dtype);
      const at::Tensor out = gelu_tanh_linear(hidden, second, std::nullopt, dtype);
      return torch::autograd::grad({out}, {weight, bias, second}, {randn(out.sizes(), dtype, 5)});
    };
    const std::vector<at::Tensor> apart = gradients();
    std::vector<at::Tensor> memory;
    for (const at::Tensor& parameter : {weight, bias, second}) {
      memory.push_back(at::full_like(parameter.detach(), 7));
      lend_gradient_memory(parameter, memory.back());
    }
    const std::vector<at::Tensor> lent = gradients();
    for (size_t i = 0; i < lent.size(); ++i) {
      EXPECT_TRUE(lent[i].is_same(memory[i])) << i;
      EXPECT_TRUE(bitwise_equal(lent[i], apart[i])) << i;
    }
    EXPECT_FALSE(gradients()[0].is_same(memory[0])) << "memory is lent once";
  }
}

TEST(GradientMemory, TwoUsesOfAWeightAdd) {
  const at::Tensor x = randn({9, 6}, at::kFloat, 1), weight = leaf(randn({6, 6}, at::kFloat, 2));
  const auto gradient = [&] {
    const at::Tensor out =
        linear(linear(x, weight, std::nullopt, at::kFloat), weight, std::nullopt, at::kFloat);
    return torch::autograd::grad({out}, {weight}, {randn(out.sizes(), at::kFloat, 3)})[0];
  };
  const at::Tensor apart = gradient(), memory = at::zeros({6, 6});
  lend_gradient_memory(weight, memory);
  const at::Tensor lent = gradient();
  EXPECT_TRUE(bitwise_equal(lent, apart));
}

TEST(GradientMemory, AnotherDtypeIsNotWritten) {
  const at::Tensor weight = leaf(randn({6, 6}, at::kBFloat16, 2)), memory = at::zeros({6, 6}, at::kFloat);
  lend_gradient_memory(weight, memory);
  const at::Tensor out = linear(randn({9, 6}, at::kBFloat16, 1), weight, std::nullopt, at::kBFloat16);
  const at::Tensor grad = torch::autograd::grad({out}, {weight}, {at::ones_like(out)})[0];
  EXPECT_EQ(grad.scalar_type(), at::kBFloat16);
  EXPECT_EQ(memory.abs().sum().item<float>(), 0);
  lend_gradient_memory(weight, {});
}

}  // namespace
}  // namespace kiln::ops
