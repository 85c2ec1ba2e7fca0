// DiT as the trainer and the sampler use it: segment by segment, with weights of other dtypes, on device
// meta. tests/reference/test_dit.py holds its numbers against other implementations.
#include "models/denoisers/dit.h"
#include "core/aten.h"

#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "core/error.h"
#include "models/denoiser_checks.h"
#include "models/registry.h"

namespace kiln {
namespace {

using testing::HasSubstr;

const nlohmann::json kTinyDit = {{"input_size", 8},          {"patch_size", 2},  {"in_channels", 4},
                                 {"hidden_size", 48},        {"depth", 2},       {"num_heads", 3},
                                 {"mlp_ratio", 4.0},         {"num_classes", 5}, {"learn_sigma", true},
                                 {"class_dropout_prob", 0.1}};

// Every path carries a signal: zero-initialised weights are drawn too.
std::unique_ptr<Denoiser> random_dit(const nlohmann::json& config,
                                     at::ScalarType compute_dtype = at::kFloat) {
  auto denoiser = build_denoiser("dit", config, {.compute_dtype = compute_dtype});
  initialize_weights(*denoiser, 0);
  for (const auto& parameter : denoiser->parameters())
    if (parameter->trainable)
      initialize(parameter->value.dim() > 1 ? Init::normal(0.1) : Init::normal(0.2), 1, parameter->key,
                 parameter->value);
  return denoiser;
}

ModelInput tiny_input(int64_t batch = 3) {
  at::manual_seed(0);
  return {.x_t = at::randn({batch, 4, 8, 8}),
          .timesteps = at::rand({batch}) * 999,
          .conditioning = {.class_labels = at::arange(batch) % 6}};
}

TEST(Dit, SegmentsAreEmbedBlocksFinal) {
  const auto denoiser = build_denoiser("dit", kTinyDit, {.device = at::kMeta});
  std::vector<std::string> names;
  for (const auto& segment : denoiser->segments()) names.push_back(segment->name());
  EXPECT_THAT(names, testing::ElementsAre("embed", "blocks.0", "blocks.1", "final"));
}

TEST(Dit, ShapeTellsTheTrainerWhatItNeeds) {
  const DenoiserShape shape = build_denoiser("dit", kTinyDit, {.device = at::kMeta})->shape();
  EXPECT_EQ(shape.in_channels, 4);
  EXPECT_EQ(shape.out_channels, 8);
  EXPECT_EQ(shape.input_size, 8);
  EXPECT_EQ(shape.conditioning.num_classes, 5);
  EXPECT_TRUE(shape.conditioning.has_null_class);
  EXPECT_EQ(shape.guided_channels, 3);
}

class DitPrecision : public testing::TestWithParam<at::ScalarType> {};

// Walks forward on detached states, then backward one segment at a time: bitwise plain autograd.
TEST_P(DitPrecision, SegmentWalkEqualsPlainAutogradBitwise) {
  const auto denoiser = random_dit(kTinyDit, GetParam());
  const ModelInput input = tiny_input();
  const std::vector<at::Tensor> leaves = require_gradients(denoiser->parameters());
  const at::Tensor output = denoiser->forward(input);
  const at::Tensor grad_output = at::randn_like(output);
  const auto expected = torch::autograd::grad({output}, leaves, {grad_output});

  std::vector<State> inputs, outputs;
  State state;
  for (const auto& segment : denoiser->segments()) {
    state.visit([](at::Tensor& tensor) { tensor = tensor.detach().set_requires_grad(true); });
    inputs.push_back(state);
    state = segment->forward(state, input);
    outputs.push_back(state);
  }
  EXPECT_TRUE(at::equal(state.hidden, output));

  std::vector<at::Tensor> gradients(1, grad_output), walked;
  for (size_t i = denoiser->segments().size(); i-- > 0;) {
    std::vector<at::Tensor> produced, wanted = require_gradients(denoiser->segments()[i]->parameters());
    const size_t num_parameters = wanted.size();
    outputs[i].visit([&](at::Tensor& tensor) { produced.push_back(tensor); });
    inputs[i].visit([&](at::Tensor& tensor) { wanted.push_back(tensor); });
    // A tensor that passes through untouched gets the gradient of both its uses.
    const auto found = torch::autograd::grad(produced, wanted, gradients);
    gradients.assign(found.begin() + num_parameters, found.end());
    walked.insert(walked.begin(), found.begin(), found.begin() + num_parameters);
  }
  ASSERT_EQ(walked.size(), expected.size());
  for (size_t i = 0; i < walked.size(); ++i) EXPECT_TRUE(at::equal(walked[i], expected[i])) << i;
}

TEST_P(DitPrecision, ForwardIsPure) {
  const at::NoGradGuard no_grad;
  const auto denoiser = random_dit(kTinyDit, GetParam());
  EXPECT_TRUE(at::equal(denoiser->forward(tiny_input()), denoiser->forward(tiny_input())));
}

INSTANTIATE_TEST_SUITE_P(Compute, DitPrecision, testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

// Training holds weights in the compute dtype; autocast casts f32 ones: the same numbers wherever a weight
// enters a product, and close to them where a table is added.
TEST(Dit, WeightsMayBeRebound) {
  const at::NoGradGuard no_grad;
  const auto denoiser = random_dit(kTinyDit, at::kBFloat16);
  const at::Tensor cast = denoiser->forward(tiny_input());
  for (const auto& parameter : denoiser->parameters())
    if (parameter->trainable) parameter->value = parameter->value.to(at::kBFloat16);
  const at::Tensor rebound = denoiser->forward(tiny_input());
  EXPECT_EQ(rebound.scalar_type(), at::kFloat);
  EXPECT_LT((rebound - cast).norm().item<double>() / cast.norm().item<double>(), 2e-2);
  for (const auto& parameter : denoiser->parameters()) parameter->value = at::zeros_like(parameter->value);
  EXPECT_FALSE(denoiser->forward(tiny_input()).any().item<bool>()) << "a segment kept an old weight";
}

TEST(Dit, RunsOnMetaWithTheShapesAndDtypesOfTheCpu) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto real = random_dit(kTinyDit, dtype);
    const auto meta = build_denoiser("dit", kTinyDit, {.device = at::kMeta, .compute_dtype = dtype});
    const ModelInput input = tiny_input();
    const ModelInput meta_input = {.x_t = input.x_t.to(at::kMeta),
                                   .timesteps = input.timesteps.to(at::kMeta),
                                   .conditioning = to_device(input.conditioning, at::kMeta)};
    const auto meta_leaves = require_gradients(meta->parameters());
    const at::Tensor expected = real->forward(input), output = meta->forward(meta_input);
    EXPECT_EQ(output.sizes(), expected.sizes());
    EXPECT_EQ(output.strides(), expected.strides());
    EXPECT_EQ(output.scalar_type(), expected.scalar_type());
    const auto gradients = torch::autograd::grad({output}, meta_leaves, {at::empty_like(output)});
    for (size_t i = 0; i < gradients.size(); ++i) EXPECT_EQ(gradients[i].sizes(), meta_leaves[i].sizes());
  }
}

TEST(Dit, UnconditionalNeedsNoLabels) {
  nlohmann::json config = kTinyDit;
  config["num_classes"] = 0;
  config["class_dropout_prob"] = 0;
  const auto denoiser = random_dit(config);
  for (const auto& parameter : denoiser->parameters())
    EXPECT_THAT(parameter->key, testing::Not(HasSubstr("y_embedder")));
  ModelInput input = tiny_input();
  input.conditioning.class_labels = at::Tensor();
  EXPECT_FALSE(denoiser->shape().conditioning.has_null_class);
  EXPECT_EQ(denoiser->forward(input).size(1), 8);
}

// As in the original, whose table has num_classes + 1 rows under dropout whatever num_classes is.
TEST(Dit, TheNullClassAloneIsATable) {
  nlohmann::json config = kTinyDit;
  config["num_classes"] = 0;
  const auto denoiser = random_dit(config);
  EXPECT_TRUE(denoiser->shape().conditioning.has_null_class);
  ModelInput input = tiny_input();
  input.conditioning.class_labels = at::zeros({input.x_t.size(0)}, at::kLong);
  EXPECT_EQ(denoiser->forward(input).size(1), 8);
}

TEST(Dit, InputsThatDoNotFitAreRefused) {
  const auto denoiser = random_dit(kTinyDit);
  ModelInput input = tiny_input();
  input.conditioning.class_labels = at::Tensor();
  EXPECT_THAT(error_of([&] { denoiser->forward(input); }), HasSubstr("class_labels are missing"));
  input = tiny_input();
  input.x_t = at::randn({3, 4, 16, 16});
  EXPECT_THAT(error_of([&] { denoiser->forward(input); }),
              HasSubstr("expected x_t of shape (B, 4, 8, 8), got (3, 4, 16, 16)"));
}

TEST(LoadWeights, ListsEverythingThatIsWrongAndChangesNothing) {
  const auto denoiser = random_dit(kTinyDit);
  std::map<std::string, at::Tensor> weights;
  for (const auto& parameter : denoiser->parameters())
    weights[parameter->key] = at::zeros_like(parameter->value);
  weights.erase("blocks.0.attn.qkv.bias");
  weights.erase("pos_embed");  // computed when absent: not an error
  weights["blocks.7.attn.qkv.bias"] = at::zeros({3});
  weights["final_layer.linear.weight"] = at::zeros({1, 48});
  const at::Tensor before = denoiser->forward(tiny_input());
  const std::string message = error_of([&] { load_weights(*denoiser, weights, "some.safetensors"); });
  EXPECT_THAT(message, HasSubstr("some.safetensors"));
  EXPECT_THAT(message, HasSubstr("missing keys: blocks.0.attn.qkv.bias;"));
  EXPECT_THAT(message, HasSubstr("unknown keys: blocks.7.attn.qkv.bias;"));
  EXPECT_THAT(message, HasSubstr("final_layer.linear.weight is (1, 48), expected (32, 48)"));
  EXPECT_TRUE(at::equal(denoiser->forward(tiny_input()), before));
}

TEST(LoadWeights, PositionTableOfAnotherSizeIsRefusedUnlessAbsent) {
  const auto denoiser = random_dit(kTinyDit);
  std::map<std::string, at::Tensor> weights;
  for (const auto& parameter : denoiser->parameters()) weights[parameter->key] = parameter->value.clone();
  weights["pos_embed"] = at::zeros({1, 64, 48});
  EXPECT_THAT(error_of([&] { load_weights(*denoiser, weights, "file"); }),
              HasSubstr("pos_embed is (1, 64, 48), expected (1, 16, 48)"));
  const at::Tensor before = denoiser->forward(tiny_input());
  weights.erase("pos_embed");
  load_weights(*denoiser, weights, "file");
  EXPECT_TRUE(at::equal(denoiser->forward(tiny_input()), before));
}

}  // namespace
}  // namespace kiln
