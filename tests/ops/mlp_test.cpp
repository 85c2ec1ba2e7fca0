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

// linear(geglu(h))

Tensors geglu_inputs(at::ScalarType dtype) {
  return {randn({3, 5, 24}, dtype, 1), randn({7, 12}, dtype, 2), randn({7}, dtype, 3)};
}

Function geglu_layer(at::ScalarType dtype) {
  return [dtype](const Tensors& in) { return geglu_linear(in[0], in[1], in[2], dtype); };
}

TEST(GegluLinear, IsItsOperationsToTheBit) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const Function apart = [dtype](const Tensors& in) { return linear(geglu(in[0]), in[1], in[2], dtype); };
    const Tensors in = geglu_inputs(dtype);
    EXPECT_TRUE(bitwise_equal(geglu_layer(dtype)(in), apart(in)));
    const at::Tensor direction = randn({3, 5, 7}, dtype, 9);
    expect_same_bits(gradients(geglu_layer(dtype), in, direction), gradients(apart, in, direction));
  }
}

TEST(GegluLinear, GradientsInF64) { gradcheck(geglu_layer(at::kDouble), geglu_inputs(at::kDouble)); }

TEST(GegluLinear, MetaAgrees) { expect_meta_agrees(geglu_layer(at::kBFloat16), geglu_inputs(at::kBFloat16)); }

TEST(GegluLinear, NamesWhatIsWrong) {
  EXPECT_ERROR(geglu_linear(at::zeros({2, 20}), at::zeros({7, 12}), std::nullopt, at::kFloat),
               "[geglu_linear] expected h (..., 2F) and weight (out, F), got 2x20 and 7x12");
}

// linear(layer_norm(x))

// x, the norm's weight and bias, the layer's bias, two weights
Tensors normed_inputs(at::ScalarType dtype) {
  return {randn({3, 5, 24}, dtype, 1), randn({24}, dtype, 2),    randn({24}, dtype, 3),
          randn({19}, dtype, 4),       randn({7, 24}, dtype, 5), randn({12, 24}, dtype, 6)};
}

Function normed_layers(at::ScalarType dtype) {
  return [dtype](const Tensors& in) {
    return layer_norm_linears(in[0], {in[1], in[2], 1e-5}, {in[4], in[5]}, in[3], dtype);
  };
}

TEST(LayerNormLinears, AreTheirOperationsToTheBit) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const Function apart = [dtype](const Tensors& in) {
      return linear(layer_norm(in[0], in[1], in[2], 1e-5, dtype), at::cat({in[4], in[5]}), in[3], dtype);
    };
    const Tensors in = normed_inputs(dtype);
    EXPECT_TRUE(bitwise_equal(normed_layers(dtype)(in), apart(in)));
    const at::Tensor direction = randn({3, 5, 19}, dtype, 9);
    expect_same_bits(gradients(normed_layers(dtype), in, direction), gradients(apart, in, direction));
  }
}

TEST(LayerNormLinears, GradientsInF64) { gradcheck(normed_layers(at::kDouble), normed_inputs(at::kDouble)); }

TEST(LayerNormLinears, MetaAgrees) {
  expect_meta_agrees(normed_layers(at::kBFloat16), normed_inputs(at::kBFloat16));
}

TEST(LayerNormLinears, HaveABackwardInADryRunOfCuda) {
  expect_gradients_in_a_dry_run_of_cuda(normed_layers(at::kBFloat16), normed_inputs(at::kBFloat16));
}

// One weight's gradient is written where it is kept, as that of a linear layer is.
TEST(LayerNormLinears, WriteAGradientWhereItIsKept) {
  const Tensors in = normed_inputs(at::kFloat);
  const at::Tensor weight = leaf(in[4]), memory = at::full_like(in[4], 7);
  lend_gradient_memory(weight, memory);
  const at::Tensor out = layer_norm_linears(in[0], {in[1], in[2], 1e-5}, {weight}, std::nullopt, at::kFloat);
  EXPECT_TRUE(torch::autograd::grad({out}, {weight}, {at::ones_like(out)})[0].is_same(memory));
}

TEST(LayerNormLinears, NameWhatIsWrong) {
  const at::Tensor affine = at::ones({20});
  EXPECT_ERROR(layer_norm_linears(at::zeros({2, 20}), {affine, affine, 1e-5}, {at::zeros({7, 12})},
                                  std::nullopt, at::kFloat),
               "[layer_norm_linears] expected x (..., D) and weights (out, D), got 2x20 and 7x12");
}

}  // namespace
}  // namespace kiln::ops
