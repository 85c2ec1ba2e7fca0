#include <algorithm>

#include "ops/checks.h"
#include "ops/gradient_memory.h"
#include "ops/op_recorder.h"

namespace kiln::ops {
namespace {

Tensors mlp_inputs(at::ScalarType dtype) {
  return {randn({3, 5, 12}, dtype, 1), randn({20, 12}, dtype, 2), randn({20}, dtype, 3),
          randn({7, 20}, dtype, 4), randn({7}, dtype, 5)};
}

Function mlp(at::ScalarType dtype) {
  return [dtype](const Tensors& in) { return gelu_tanh_mlp(in[0], {in[1], in[2], in[3], in[4]}, dtype); };
}

Function layer_by_layer(at::ScalarType dtype) {
  return [dtype](const Tensors& in) {
    return gelu_tanh_linear(linear(in[0], in[1], in[2], dtype), in[3], in[4], dtype);
  };
}

TEST(GeluTanhMlp, IsItsLayersToTheBit) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const Tensors in = mlp_inputs(dtype);
    EXPECT_TRUE(bitwise_equal(mlp(dtype)(in), layer_by_layer(dtype)(in)));
    const at::Tensor direction = randn({3, 5, 7}, dtype, 9);
    expect_same_bits(gradients(mlp(dtype), in, direction), gradients(layer_by_layer(dtype), in, direction));
  }
}

// Gelu is then computed once, and on a CPU nothing else changes.
TEST(GeluTanhMlp, KeepsGeluOnRequest) {
  const Tensors in = mlp_inputs(at::kBFloat16);
  const at::Tensor direction = randn({3, 5, 7}, at::kBFloat16, 9);
  std::vector<Tensors> found;
  for (const bool keeps : {false, true}) {
    const OpChoicesScope scope({.keep_gelu = keeps});
    OpRecorder recorder(/*timed=*/false);
    found.push_back(gradients(mlp(at::kBFloat16), in, direction));
    const std::vector<OpRecord> ops = recorder.take();
    EXPECT_EQ(std::ranges::count(ops, "kiln::gelu_tanh", &OpRecord::name), keeps ? 1 : 2);
  }
  expect_same_bits(found[0], found[1]);
}

TEST(GeluTanhMlp, GradientsInF64) { gradcheck(mlp(at::kDouble), mlp_inputs(at::kDouble)); }

TEST(GeluTanhMlp, MetaAgrees) { expect_meta_agrees(mlp(at::kBFloat16), mlp_inputs(at::kBFloat16)); }

TEST(GeluTanhMlp, WritesGradientsWhereTheyAreKept) {
  Tensors leaves, memory;
  for (const at::Tensor& tensor : mlp_inputs(at::kFloat)) leaves.push_back(leaf(tensor));
  for (const at::Tensor& leaf : leaves) {
    memory.push_back(at::full_like(leaf.detach(), 7));
    lend_gradient_memory(leaf, memory.back());
  }
  const at::Tensor out = mlp(at::kFloat)(leaves);
  const Tensors got = torch::autograd::grad({out}, leaves, {at::ones_like(out)});
  for (size_t i = 1; i < leaves.size(); ++i) EXPECT_TRUE(got[i].is_same(memory[i])) << i;
}

TEST(GeluTanhMlp, RefusesWeightsThatDoNotFit) {
  Tensors in = mlp_inputs(at::kFloat);
  in[3] = at::zeros({7, 21});
  EXPECT_NE(message_of([&] { mlp(at::kFloat)(in); }).find("20x12 and 7x21"), std::string::npos);
}

}  // namespace
}  // namespace kiln::ops
