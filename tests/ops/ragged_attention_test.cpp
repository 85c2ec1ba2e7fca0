#include <limits>

#include "ops/caption_attention.h"
#include "ops/checks.h"

namespace kiln::ops {
namespace {

using Offsets = std::vector<int64_t>;
constexpr double kScale = 0.3;

struct RaggedCase {
  int64_t num_tokens, num_heads, head_dim, num_rows;
  Offsets offsets;
  at::ScalarType dtype;
};

class Ragged : public ::testing::TestWithParam<RaggedCase> {};

Tensors ragged_inputs(const RaggedCase& c) {
  const int64_t batch = static_cast<int64_t>(c.offsets.size()) - 1;
  return {randn({batch, c.num_tokens, c.num_heads, c.head_dim}, c.dtype, 1),
          randn({c.num_rows, c.num_heads, c.head_dim}, c.dtype, 2),
          randn({c.num_rows, c.num_heads, c.head_dim}, c.dtype, 3)};
}

Function attended(const Offsets& offsets) {
  return [=](const Tensors& in) { return ragged_attention(in[0], in[1], in[2], offsets, kScale); };
}

// Independent of the reference: a mask over all rows.
at::Tensor masked(const Tensors& in, const Offsets& offsets) {
  const at::Tensor q = in[0].to(at::kDouble), k = in[1].to(at::kDouble), v = in[2].to(at::kDouble);
  at::Tensor result = at::zeros(q.sizes(), q.options());
  for (int64_t b = 0; b < q.size(0); ++b)
    for (int64_t h = 0; h < q.size(2); ++h)
      for (int64_t n = 0; n < q.size(1) && offsets[b] < offsets[b + 1]; ++n) {
        at::Tensor weights = (k.select(1, h) * q[b][n][h]).sum(1).mul(kScale).exp();
        weights.narrow(0, 0, offsets[b]).zero_();
        weights.narrow(0, offsets[b + 1], weights.size(0) - offsets[b + 1]).zero_();
        result[b][n][h].copy_((weights.unsqueeze(1) * v.select(1, h)).sum(0) / weights.sum());
      }
  return result.flatten(2);
}

TEST_P(Ragged, EqualsAMaskOverAllRows) {
  const RaggedCase& c = GetParam();
  const Tensors inputs = ragged_inputs(c);
  const at::Tensor out = attended(c.offsets)(inputs);
  EXPECT_EQ(out.scalar_type(), c.dtype);
  expect_close(out, masked(inputs, c.offsets), 4 * tolerance_of(c.dtype));
}

TEST_P(Ragged, GradientsEqualTheReferenceInF64) {
  const auto apply = attended(GetParam().offsets);
  // Without rows the result depends on nothing.
  const auto by_inputs = [&](const Tensors& in) {
    return GetParam().num_rows > 0 ? apply(in) : apply(in) + 0 * (in[0].sum() + in[1].sum() + in[2].sum());
  };
  expect_equals_reference(apply, by_inputs, ragged_inputs(GetParam()), {.result = 4, .gradients = 10});
}

TEST_P(Ragged, MetaAgrees) { expect_meta_agrees(attended(GetParam().offsets), ragged_inputs(GetParam())); }

TEST_P(Ragged, ThreadCountDoesNotMatter) {
  expect_thread_count_does_not_matter(attended(GetParam().offsets), ragged_inputs(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Ragged,
    ::testing::Values(RaggedCase{33, 3, 8, 12, {0, 5, 5, 12}, kF32},  // one without rows
                      RaggedCase{7, 2, 72, 40, {0, 1, 40}, kF32},
                      RaggedCase{70, 2, 64, 90, {0, 40, 77}, kBf16},  // rows of no sample
                      RaggedCase{16, 4, 16, 9, {2, 4, 9}, kFp16}, RaggedCase{5, 1, 6, 0, {0, 0}, kF32},
                      RaggedCase{130, 1, 33, 67, {0, 1, 67}, kF32},    // more than a block, odd sizes
                      RaggedCase{600, 2, 8, 20, {1, 8, 8, 19}, kF32},  // queries in pieces
                      RaggedCase{700, 1, 32, 7, {0, 7}, kBf16},        // likewise
                      RaggedCase{20, 1, 16, 900, {3, 200, 200, 899}, kBf16}));  // more than a panel

TEST(RaggedAttention, GradcheckInF64) {
  gradcheck(attended({0, 2, 2, 5}),
            {randn({3, 2, 2, 3}), randn({6, 2, 3}, at::kDouble, 2), randn({6, 2, 3}, at::kDouble, 3)});
}

// As many rows in every sample, and what a dry run takes is what a real one takes.
TEST(CrossAttention, EqualsAMaskOverAllRows) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const Tensors inputs = ragged_inputs({7, 2, 8, 15, {0, 5, 10, 15}, dtype});
    const auto attend = [](const Tensors& in) {
      const auto samples = [&](const at::Tensor& rows) { return rows.view({3, 5, 2, 8}); };
      return cross_attention(in[0], samples(in[1]), samples(in[2]), kScale);
    };
    expect_close(attend(inputs), masked(inputs, {0, 5, 10, 15}), 4 * tolerance_of(dtype));
    expect_meta_agrees(attend, inputs);
  }
}

// All samples at once give the bits that each gives alone, forward and backward, and a dry run takes as much.
TEST(RaggedAttention, ASampleGivesItsBitsAlone) {
  const RaggedCase all{40, 2, 16, 900, {0, 300, 600, 900}, kBf16};
  const Tensors inputs = ragged_inputs(all);
  const auto apply = [](const Offsets& offsets) -> Function {
    return [=](const Tensors& in) { return ragged_attention(in[0], in[1], in[2], offsets, kScale); };
  };
  const at::Tensor out = apply(all.offsets)(inputs);
  expect_close(out, masked(inputs, all.offsets), 4 * tolerance_of(kBf16));
  expect_meta_agrees(apply(all.offsets), inputs);
  const at::Tensor grad_out = randn(out.sizes(), kBf16, 4);
  const Tensors gradients = testing::gradients(apply(all.offsets), inputs, grad_out);
  for (int64_t b = 0; b < 3; ++b) {
    // Two rows of no sample.
    const auto rows_of = [&](const at::Tensor& rows) {
      return at::cat({rows.narrow(0, 300 * b, 300), rows.narrow(0, 0, 2)});
    };
    const Tensors alone = {inputs[0].narrow(0, b, 1), rows_of(inputs[1]), rows_of(inputs[2])};
    EXPECT_TRUE(bitwise_equal(out.narrow(0, b, 1), apply({0, 300})(alone)));
    const Tensors of_alone = testing::gradients(apply({0, 300}), alone, grad_out.narrow(0, b, 1));
    EXPECT_TRUE(bitwise_equal(gradients[0].narrow(0, b, 1), of_alone[0]));
    for (size_t i = 1; i < 3; ++i)
      EXPECT_TRUE(bitwise_equal(gradients[i].narrow(0, 300 * b, 300), of_alone[i].narrow(0, 0, 300)));
  }
}

TEST(RaggedAttention, TakesPartsOfAPackedProjection) {
  const at::Tensor q = randn({2, 9, 2, 8}, kF32), kv = randn({7, 2, 2, 8}, kF32, 2);
  const at::Tensor k = kv.select(1, 0), v = kv.select(1, 1);
  EXPECT_TRUE(bitwise_equal(ragged_attention(q, k, v, {0, 3, 7}, kScale),
                            ragged_attention(q, k.contiguous(), v.contiguous(), {0, 3, 7}, kScale)));
}

// A sum over queries belongs to their sample alone, and is made anew in each call.
TEST(RaggedAttention, NanStaysInItsSample) {
  Tensors inputs = {randn({2, 9, 1, 8}, kF32), randn({7, 1, 8}, kF32, 2), randn({7, 1, 8}, kF32, 3)};
  inputs[0][0][4][0][2] = std::numeric_limits<float>::quiet_NaN();
  const auto apply = attended({0, 3, 7});
  const at::Tensor out = apply(inputs);
  EXPECT_TRUE(at::isnan(out[0][4]).all().item<bool>());
  EXPECT_EQ(at::isnan(out).sum().item<int64_t>(), 8);
  const Tensors gradients = testing::gradients(apply, inputs, at::ones_like(out));
  for (size_t i = 1; i < 3; ++i) {
    EXPECT_TRUE(at::isnan(gradients[i].narrow(0, 0, 3)).all().item<bool>());
    EXPECT_FALSE(at::isnan(gradients[i].narrow(0, 3, 4)).any().item<bool>());
  }
}

// Scores far apart leave one weight of 1; none overflows.
TEST(RaggedAttention, LargeScoresPickOneRow) {
  const at::Tensor q = at::full({1, 3, 1, 4}, 1000.0), v = randn({5, 1, 4}, kF32, 3);
  at::Tensor k = at::zeros({5, 1, 4});
  k[3].fill_(2);
  EXPECT_TRUE(at::equal(ragged_attention(q.to(kF32), k.to(kF32), v, {0, 5}, 1.0)[0][1], v[3][0]));
}

TEST(RaggedAttention, NamesWhatIsWrong) {
  const at::Tensor q = at::zeros({2, 3, 2, 4}), rows = at::zeros({5, 2, 4});
  const auto message = [&](const at::Tensor& v, const Offsets& offsets) {
    return message_of([&] { ragged_attention(q, rows, v, offsets, 1); });
  };
  EXPECT_THAT(message(at::zeros({5, 2, 3}), {0, 2, 5}),
              HasSubstr("[ragged_attention] expected q (B, N, H, d) and k, v (T, H, d)"));
  EXPECT_THAT(message(rows, {0, 3, 2}), HasSubstr("expected 3 ascending offsets within 5 rows, got 0, 3, 2"));
  EXPECT_THAT(message(rows, {0, 6}), HasSubstr("got 0, 6"));
}

}  // namespace
}  // namespace kiln::ops
