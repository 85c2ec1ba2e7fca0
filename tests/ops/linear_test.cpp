#include "ops/checks.h"

namespace kiln::ops {
namespace {

using Op = at::Tensor (*)(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                          at::ScalarType);

at::Tensor linear_in_compute_dtype(const at::Tensor& x, const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias, at::ScalarType compute_dtype) {
  return linear(x, weight, bias, compute_dtype);
}

struct OpCase {
  const char* name;
  Op op, reference;
};
void PrintTo(const OpCase& c, std::ostream* out) { *out << c.name; }

// linear and gelu_tanh_linear share their shape, dtypes and errors.
class LinearOps : public ::testing::TestWithParam<OpCase> {
 protected:
  static at::Tensor run(Op op, const Tensors& in, at::ScalarType compute_dtype) {
    return op(in[0], in[1], in.size() > 2 ? std::optional(in[2]) : std::nullopt, compute_dtype);
  }

  // Result and gradients against the reference in f64 on the same rounded numbers.
  static void expect_reference(const Tensors& inputs, at::ScalarType compute_dtype, double rtol) {
    const Tensors rounded = in_f64(each_to(compute_dtype, inputs));
    const auto actual = [&](const Tensors& in) { return run(GetParam().op, in, compute_dtype); };
    const auto wide = [&](const Tensors& in) { return run(GetParam().reference, in, at::kDouble); };
    const at::Tensor out = actual(inputs);
    EXPECT_EQ(out.scalar_type(), compute_dtype);
    expect_close(out, wide(rounded), rtol);
    const at::Tensor direction = randn(out.sizes(), compute_dtype, 9);
    const Tensors grads = gradients(actual, inputs, direction);
    const Tensors expected = gradients(wide, rounded, direction.to(at::kDouble));
    for (size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_EQ(grads[i].scalar_type(), inputs[i].scalar_type());
      expect_close(grads[i], expected[i], rtol);
    }
  }

  static double tolerance(at::ScalarType dtype) {
    return dtype == at::kFloat ? 1e-5 : dtype == at::kHalf ? 3e-3 : 2e-2;
  }
};

TEST_P(LinearOps, MatchReferenceInEveryDtype) {
  for (const auto compute : {at::kFloat, at::kBFloat16, at::kHalf})
    for (const auto stored : {at::kFloat, compute})
      for (const bool with_bias : {true, false}) {
        Tensors inputs = {randn({3, 130, 48}, stored, 1), randn({40, 48}, stored, 2)};
        if (with_bias) inputs.push_back(randn({40}, stored, 3));
        expect_reference(inputs, compute, tolerance(compute));
      }
}

TEST_P(LinearOps, TakeAnyNumberOfDimensionsAndRaggedSizes) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{5}, {1, 5}, {7, 5}, {2, 3, 1, 5}, {600, 5}})
    expect_reference({randn(shape, at::kFloat, 1), randn({3, 5}, at::kFloat, 2), randn({3}, at::kFloat, 3)},
                     at::kFloat, 1e-5);
}

TEST_P(LinearOps, TakeStridedInputAndGradient) {
  const at::Tensor x = randn({48, 6, 4}, at::kFloat, 1).transpose(0, 2);  // (4, 6, 48)
  const at::Tensor weight = randn({10, 48}, at::kFloat, 2);
  const auto transposed = [&](Op op) {
    return [op](const Tensors& in) { return op(in[0], in[1], std::nullopt, at::kFloat).transpose(0, 2); };
  };
  const at::Tensor direction = randn({10, 6, 4}, at::kFloat, 3);
  const Tensors grads = gradients(transposed(GetParam().op), {x, weight}, direction);
  const Tensors expected = gradients(transposed(GetParam().reference), {x, weight}, direction);
  for (size_t i = 0; i < grads.size(); ++i) expect_close(grads[i], expected[i], 1e-5);
}

TEST_P(LinearOps, GradientIsExactInF64) {
  gradcheck([](const Tensors& in) { return run(GetParam().op, in, at::kDouble); },
            {randn({2, 3, 5}, at::kDouble, 1), randn({4, 5}, at::kDouble, 2), randn({4}, at::kDouble, 3)});
}

TEST_P(LinearOps, GiveOnlyTheGradientsAskedFor) {
  const at::Tensor x = randn({6, 5}, at::kFloat, 1), weight = leaf(randn({4, 5}, at::kFloat));
  const at::Tensor out = GetParam().op(x, weight, std::nullopt, at::kFloat);
  const at::Tensor grad = torch::autograd::grad({out}, {weight}, {at::ones_like(out)})[0];
  EXPECT_EQ(grad.sizes(), weight.sizes());
  EXPECT_FALSE(x.requires_grad());
}

TEST_P(LinearOps, SameBitsAgain) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const Tensors inputs = {randn({700, 64}, dtype, 1), randn({96, 64}, dtype, 2), randn({96}, dtype, 3)};
    const auto f = [&](const Tensors& in) { return run(GetParam().op, in, dtype); };
    const at::Tensor direction = randn({700, 96}, dtype, 4);
    expect_same_bits(gradients(f, inputs, direction), gradients(f, inputs, direction));
  }
}

TEST_P(LinearOps, MetaAgrees) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf})
    expect_meta_agrees([&](const Tensors& in) { return run(GetParam().op, in, dtype); },
                       {randn({2, 6, 8}, dtype, 1), randn({4, 8}, at::kFloat, 2), randn({4}, dtype, 3)});
}

TEST_P(LinearOps, NameAWrongShape) {
  const auto wrong = [] { GetParam().op(at::zeros({2, 6}), at::zeros({4, 5}), std::nullopt, at::kFloat); };
  EXPECT_THAT(message_of(wrong), HasSubstr("weight (out, in), got 2x6 and 4x5"));
}

INSTANTIATE_TEST_SUITE_P(All, LinearOps,
                         ::testing::Values(OpCase{"linear", linear_in_compute_dtype, reference::linear},
                                           OpCase{"gelu_tanh_linear", gelu_tanh_linear,
                                                  reference::gelu_tanh_linear}));

// The bias gradient is summed in f32 whatever the dtype: 4,096 ones in bf16 would stop at 256.
TEST(Linear, BiasGradientDoesNotSaturate) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor bias = leaf(at::zeros({24}, dtype));
    const at::Tensor out = linear(at::zeros({4096, 8}, dtype), at::zeros({24, 8}, dtype), bias, dtype);
    const at::Tensor grad = torch::autograd::grad({out}, {bias}, {at::ones_like(out)})[0];
    EXPECT_TRUE(at::equal(grad, at::full({24}, 4096, dtype)));
  }
}

// Two threads divide such products into pieces, as far as the processor's bits allow it; more threads fewer
// of them, one none.
TEST(Linear, LargeProductsHaveTheSameBitsOnAnyNumberOfThreads) {
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const auto& [in, out] : {std::pair(512, 1536), std::pair(1536, 512)}) {
      SCOPED_TRACE(::testing::Message() << dtype << ", " << in << " to " << out);
      expect_thread_count_does_not_matter(
          [&](const Tensors& t) { return linear(t[0], t[1], t[2], dtype); },
          {randn({2048, in}, dtype, 1), randn({out, in}, dtype, 2), randn({out}, dtype, 3)});
    }
}

// With the weight already in compute dtype nothing is copied: what backward keeps is x and the weight
// themselves.
TEST(Linear, SavesItsOperandsWithoutCopies) {
  const at::Tensor x = leaf(randn({6, 8}, at::kBFloat16));
  const at::Tensor weight = leaf(randn({4, 8}, at::kBFloat16));
  const size_t x_uses = x.use_count(), weight_uses = weight.use_count();
  const at::Tensor out = linear(x, weight, std::nullopt, at::kBFloat16);
  EXPECT_GT(x.use_count(), x_uses);
  EXPECT_GT(weight.use_count(), weight_uses);
}

}  // namespace
}  // namespace kiln::ops
