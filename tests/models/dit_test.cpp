// DiT as the trainer and the sampler use it: segment by segment, with weights of other dtypes, on device
// meta. tests/reference/test_dit.py holds its numbers against other implementations.
#include "models/denoisers/dit/dit.h"
#include "core/aten.h"

#include "models/denoiser_checks.h"
#include "models/registry.h"

namespace kiln {
namespace {

const nlohmann::json kTinyDit = {{"input_size", 8},          {"patch_size", 2},  {"in_channels", 4},
                                 {"hidden_size", 48},        {"depth", 2},       {"num_heads", 3},
                                 {"mlp_ratio", 4.0},         {"num_classes", 5}, {"learn_sigma", true},
                                 {"class_dropout_prob", 0.1}};

std::unique_ptr<Denoiser> random_dit(const nlohmann::json& config,
                                     at::ScalarType compute_dtype = at::kFloat) {
  auto denoiser = build_denoiser("dit", config, {.compute_dtype = compute_dtype});
  draw_trained_weights(*denoiser, 0.1, 0.2);
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
  EXPECT_THAT(names_of_segments(*denoiser), ElementsAre("embed", "blocks.0", "blocks.1", "final"));
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

TEST_P(DitPrecision, SegmentWalkEqualsPlainAutogradBitwise) {
  expect_walk_equals_plain_autograd(*random_dit(kTinyDit, GetParam()), tiny_input());
}

TEST_P(DitPrecision, ForwardIsPure) {
  const at::NoGradGuard no_grad;
  const auto denoiser = random_dit(kTinyDit, GetParam());
  EXPECT_TRUE(at::equal(denoiser->forward(tiny_input()), denoiser->forward(tiny_input())));
}

INSTANTIATE_TEST_SUITE_P(Compute, DitPrecision, testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(Dit, WeightsMayBeRebound) {
  expect_weights_may_be_rebound(*random_dit(kTinyDit, at::kBFloat16), tiny_input(), 2e-2);
}

TEST(Dit, RunsOnMetaWithTheShapesAndDtypesOfTheCpu) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    expect_the_same_on_meta(*random_dit(kTinyDit, dtype),
                            *build_denoiser("dit", kTinyDit, {.device = at::kMeta, .compute_dtype = dtype}),
                            tiny_input());
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
  EXPECT_ERROR(denoiser->forward(input), "class_labels are missing");
  input = tiny_input();
  input.x_t = at::randn({3, 4, 16, 16});
  EXPECT_ERROR(denoiser->forward(input), "expected x_t of shape (B, 4, 8, 8), got (3, 4, 16, 16)");
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
  EXPECT_ERROR(load_weights(*denoiser, weights, "some.safetensors"), "some.safetensors",
               "missing keys: blocks.0.attn.qkv.bias;", "unknown keys: blocks.7.attn.qkv.bias;",
               "final_layer.linear.weight is (1, 48), expected (32, 48)");
  EXPECT_TRUE(at::equal(denoiser->forward(tiny_input()), before));
}

TEST(LoadWeights, PositionTableOfAnotherSizeIsRefusedUnlessAbsent) {
  const auto denoiser = random_dit(kTinyDit);
  std::map<std::string, at::Tensor> weights;
  for (const auto& parameter : denoiser->parameters()) weights[parameter->key] = parameter->value.clone();
  weights["pos_embed"] = at::zeros({1, 64, 48});
  EXPECT_ERROR(load_weights(*denoiser, weights, "file"), "pos_embed is (1, 64, 48), expected (1, 16, 48)");
  const at::Tensor before = denoiser->forward(tiny_input());
  weights.erase("pos_embed");
  load_weights(*denoiser, weights, "file");
  EXPECT_TRUE(at::equal(denoiser->forward(tiny_input()), before));
}

}  // namespace
}  // namespace kiln
