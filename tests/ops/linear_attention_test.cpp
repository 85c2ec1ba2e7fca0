#include <limits>

#include "ops/checks.h"

namespace kiln::ops {
namespace {

struct LinearCase {
  int64_t batch, num_tokens, num_heads, head_dim;
  at::ScalarType dtype;
};

class LinearAttention : public ::testing::TestWithParam<LinearCase> {};

Tensors linear_inputs(const LinearCase& c) {
  const std::vector<int64_t> shape = {c.batch, c.num_tokens, c.num_heads, c.head_dim};
  return {randn(shape, c.dtype, 1), randn(shape, c.dtype, 2), randn(shape, c.dtype, 3)};
}

at::Tensor linear_attended(const Tensors& in) { return relu_linear_attention(in[0], in[1], in[2]); }

at::Tensor linear_by_reference(const Tensors& in) {
  return reference::relu_linear_attention(in[0], in[1], in[2]);
}

// By the definition: each token is a mean of all values, weighted by relu(q) . relu(k).
at::Tensor weighted_means(const Tensors& in) {
  const auto heads = [](const at::Tensor& tensor) { return tensor.to(at::kDouble).transpose(1, 2); };
  const at::Tensor weights =
      at::matmul(heads(in[0]).clamp_min(0), heads(in[1]).clamp_min(0).transpose(-2, -1));  // (B, H, N, N)
  return at::matmul(weights / (weights.sum(-1, /*keepdim=*/true) + 1e-15), heads(in[2]))
      .transpose(1, 2)
      .flatten(2);
}

TEST_P(LinearAttention, IsAWeightedMeanOfTheValues) {
  const Tensors inputs = linear_inputs(GetParam());
  const at::Tensor out = linear_attended(inputs);
  EXPECT_EQ(out.scalar_type(), GetParam().dtype);
  expect_close(out, weighted_means(inputs), tolerance_of(GetParam().dtype));
}

TEST_P(LinearAttention, GradientsEqualTheReferenceInF64) {
  const Tensors inputs = linear_inputs(GetParam());
  // Of one row they are zero.
  expect_equals_reference(linear_attended, linear_by_reference, inputs, {.gradients = 4, .atol = 1e-6});
  expect_equals_reference(linear_attended, linear_by_reference, in_f64(inputs), {.atol = 1e-12});
}

TEST_P(LinearAttention, MetaAgrees) { expect_meta_agrees(linear_attended, linear_inputs(GetParam())); }

TEST_P(LinearAttention, HasABackwardInADryRunOfCuda) {
  expect_gradients_in_a_dry_run_of_cuda(linear_attended, linear_inputs(GetParam()));
}

TEST_P(LinearAttention, ThreadCountDoesNotMatter) {
  expect_thread_count_does_not_matter(linear_attended, linear_inputs(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Shapes, LinearAttention,
                         ::testing::Values(LinearCase{2, 65, 3, 32, kF32}, LinearCase{1, 7, 2, 5, kF32},
                                           LinearCase{2, 40, 2, 33, kBf16}, LinearCase{1, 130, 1, 32, kBf16},
                                           LinearCase{3, 9, 2, 16, kFp16}, LinearCase{1, 1, 1, 1, kF32}));

TEST(ReluLinearAttention, GradcheckInF64) {
  // Away from the kinks of the ReLU.
  const auto apart = [](uint64_t seed) {
    const at::Tensor x = randn({2, 3, 2, 4}, at::kDouble, seed);
    return at::where(x > 0, x + 0.1, x - 0.1);
  };
  gradcheck(linear_attended, {apart(1), apart(2), randn({2, 3, 2, 4}, at::kDouble, 3)});
}

TEST(ReluLinearAttention, TakesPartsOfAPackedProjection) {
  const at::Tensor qkv = randn({2, 9, 3, 2, 8}, kF32);
  const at::Tensor q = qkv.select(2, 0), k = qkv.select(2, 1), v = qkv.select(2, 2);
  EXPECT_TRUE(bitwise_equal(relu_linear_attention(q, k, v),
                            relu_linear_attention(q.contiguous(), k.contiguous(), v.contiguous())));
}

TEST(ReluLinearAttention, TokensWithoutAnyPositiveFeatureGiveZero) {
  const at::Tensor q = -at::ones({1, 4, 1, 8}), k = randn({1, 4, 1, 8}, kF32, 2);
  EXPECT_FALSE(relu_linear_attention(q, k, k).any().item<bool>());
  const Tensors gradients = testing::gradients(linear_attended, {q, k, k}, at::ones({1, 4, 8}));
  for (const at::Tensor& gradient : gradients) EXPECT_TRUE(at::isfinite(gradient).all().item<bool>());
}

TEST(ReluLinearAttention, NanSpreads) {
  at::Tensor q = randn({1, 4, 1, 8}, kF32);
  q[0][2][0][3] = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor k = randn({1, 4, 1, 8}, kF32, 2);
  EXPECT_TRUE(at::isnan(relu_linear_attention(q, k, k)[0][2]).all().item<bool>());
  EXPECT_TRUE(at::isnan(relu_linear_attention(k, q, k)).all().item<bool>());
}

// 16,384 tokens: a 4096 px picture. The sums are f32 also for bf16 tokens.
TEST(ReluLinearAttention, LongSumsKeepTheirDigits) {
  const Tensors inputs = linear_inputs({1, 16384, 1, 32, kBf16});
  const Tensors f32 = each_to(kF32, inputs);
  expect_close(linear_attended(inputs), linear_attended(f32), tolerance_of(kBf16));
  expect_close(linear_attended(f32), linear_attended(in_f64(f32)), 2e-5);
}

TEST(ReluLinearAttention, NamesWhatIsWrong) {
  const at::Tensor q = at::zeros({1, 4, 2, 8});
  EXPECT_ERROR(relu_linear_attention(q, q, at::zeros({1, 4, 2, 7})),
               "[relu_linear_attention] expected q, k, v (B, N, H, d) of one dtype");
}

}  // namespace
}  // namespace kiln::ops
