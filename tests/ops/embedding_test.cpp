#include "ops/checks.h"

namespace kiln::ops {
namespace {

const at::Tensor kIds = at::tensor({3, 0, 3, 6, 3}, at::kLong);  // a repeated row, unused rows

at::Tensor rows_of(const Tensors& in) { return embedding_rows(in[0], kIds.to(in[0].device())); }
at::Tensor composed_rows(const Tensors& in) { return reference::embedding_rows(in[0], kIds); }

class Embedding : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(Embedding, ResultAndGradientMatchTheReference) {
  const Tensors inputs = {randn({7, 5}, GetParam(), 1)};
  const at::Tensor out = rows_of(inputs);
  EXPECT_EQ(out.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(out, composed_rows(inputs)));
  const at::Tensor direction = randn({5, 5}, at::kFloat, 2);
  const at::Tensor gradient = gradients(rows_of, inputs, direction)[0];
  EXPECT_EQ(gradient.scalar_type(), GetParam());
  // Summed in f32 and rounded once.
  const at::Tensor expected = gradients(composed_rows, {inputs[0].to(at::kFloat)}, direction)[0];
  EXPECT_TRUE(at::equal(gradient, expected.to(GetParam())));
  EXPECT_FALSE(gradient[1].any().item<bool>());
}

TEST_P(Embedding, MetaAgrees) { expect_meta_agrees(rows_of, {randn({7, 5}, GetParam())}); }

INSTANTIATE_TEST_SUITE_P(Dtypes, Embedding, ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(EmbeddingOp, Gradcheck) { gradcheck(rows_of, {randn({7, 3})}); }

TEST(EmbeddingOp, WrongInputsAreRefused) {
  EXPECT_ERROR(embedding_rows(at::zeros({3}), kIds), "expected table (rows, D)");
  EXPECT_ERROR(embedding_rows(at::zeros({3, 2}), kIds.to(at::kFloat)), "i64 ids");
}

}  // namespace
}  // namespace kiln::ops
