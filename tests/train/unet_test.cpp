// The U-Net as the trainer and the sampler use it: segment by segment with its stack of skips, with weights
// of other dtypes, on device meta. tests/reference/test_unet.py holds its numbers against diffusers.
#include "models/denoisers/unet/unet.h"

#include "models/denoiser_checks.h"
#include "models/lora.h"
#include "models/registry.h"
#include "step/segment_graph.h"

namespace kiln {
namespace {

std::unique_ptr<Denoiser> random_unet(at::ScalarType compute_dtype = at::kFloat) {
  auto denoiser = build_denoiser("unet2d_condition", kTinyUnet, {.compute_dtype = compute_dtype});
  initialize_weights(*denoiser, 0);
  return denoiser;
}

// Sides that no stride divides.
ModelInput unet_input(int64_t batch = 2) {
  at::manual_seed(0);
  return {.x_t = at::randn({batch, 4, 7, 9}),
          .timesteps = at::rand({batch}) * 999,
          .conditioning = {.text = text_rows_of(at::randn({batch, 5, 12}), at::Tensor())}};
}

TEST(Unet, SegmentsFollowTheResnets) {
  const auto denoiser = random_unet();
  EXPECT_THAT(names_of_segments(*denoiser),
              ElementsAre("embed", "down.0.0", "down.0.1", "down.1.0", "down.1.1", "mid", "up.0.0", "up.0.1",
                          "up.0.2", "up.1.0", "up.1.1", "up.1.2", "final"));
  int64_t depth = 0;
  for (const auto& segment : denoiser->segments()) depth += segment->skips().pushes - segment->skips().pops;
  EXPECT_EQ(depth, 0);
}

struct WalkCase {
  at::ScalarType dtype;
  bool recomputes;
};
class UnetWalk : public testing::TestWithParam<WalkCase> {};

// What the uses inside a segment give to its input is summed before a skip's gradient joins, as in the walk.
at::Tensor forward_in_one_graph(const std::vector<std::unique_ptr<Segment>>& segments,
                                const ModelInput& input) {
  State state;
  SkipStack stack;
  for (const auto& segment : segments) {
    stack.enter(state, segment->skips());
    state.visit([](at::Tensor& tensor) { tensor = tensor.view_as(tensor); });
    state = segment->forward(state, input);
    stack.leave(state, segment->skips());
  }
  return state.hidden;
}

// Forward on detached states, backward one segment at a time, the skips' gradients waiting for the segments
// that pushed them: bitwise plain autograd.
TEST_P(UnetWalk, EqualsPlainAutogradBitwise) {
  const auto denoiser = random_unet(GetParam().dtype);
  const bool recomputes = GetParam().recomputes;
  const ModelInput input = unet_input();
  const std::vector<at::Tensor> leaves = require_gradients(denoiser->parameters());
  const auto& segments = denoiser->segments();
  const at::Tensor output = forward_in_one_graph(segments, input);
  const at::Tensor grad_output = at::randn_like(output);
  const auto expected = torch::autograd::grad({output}, leaves, {grad_output});

  std::vector<State> inputs;
  std::vector<Edges> outputs;
  State state;
  SkipStack stack;
  for (const auto& segment : segments) {
    const at::AutoGradMode with_graph(!recomputes);
    stack.enter(state, segment->skips());
    inputs.push_back(detached(state, !recomputes));
    state = segment->forward(inputs.back(), input);
    outputs.push_back(recomputes ? Edges() : edges_of(state));
    stack.leave(state, segment->skips());
  }
  EXPECT_TRUE(at::equal(state.hidden, output));
  {
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(denoiser->forward(input), output));
  }

  std::vector<at::Tensor> gradients = {grad_output}, walked;
  SkipGradients skip_gradients;
  for (size_t i = segments.size(); i-- > 0;) {
    if (recomputes) {
      inputs[i] = detached(inputs[i], true);
      State again = segments[i]->forward(inputs[i], input);
      outputs[i] = edges_of(again);
    }
    skip_gradients.append_pushed(gradients, segments[i]->skips().pushes);
    SegmentGradients found = backward_through(std::move(outputs[i]), std::move(gradients),
                                              segments[i]->parameters(), std::move(inputs[i]));
    walked.insert(walked.begin(), found.weights.begin(), found.weights.end());
    gradients = std::move(found.inputs);
    skip_gradients.take_popped(gradients, segments[i]->skips().pops);
  }
  ASSERT_EQ(walked.size(), expected.size());
  for (size_t i = 0; i < walked.size(); ++i) EXPECT_TRUE(at::equal(walked[i], expected[i])) << i;
}

INSTANTIATE_TEST_SUITE_P(Compute, UnetWalk,
                         testing::Values(WalkCase{at::kFloat, false}, WalkCase{at::kFloat, true},
                                         WalkCase{at::kBFloat16, false}, WalkCase{at::kBFloat16, true},
                                         WalkCase{at::kHalf, true}),
                         [](const auto& info) {
                           return std::string(c10::toString(info.param.dtype)) +
                                  (info.param.recomputes ? "Recomputed" : "Kept");
                         });

TEST(Unet, WeightsMayBeRebound) {
  expect_weights_may_be_rebound(*random_unet(at::kBFloat16), unet_input(), 2e-2);
}

TEST(Unet, RunsOnMetaWithTheShapesAndDtypesOfTheCpu) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    expect_the_same_on_meta(
        *random_unet(dtype),
        *build_denoiser("unet2d_condition", kTinyUnet, {.device = at::kMeta, .compute_dtype = dtype}),
        unet_input());
}

TEST(Unet, InputsThatDoNotFitAreRefused) {
  const auto denoiser = random_unet();
  ModelInput input = unet_input();
  input.conditioning.text = {};
  EXPECT_ERROR(denoiser->forward(input), "expected captions of 2 samples");
  input = unet_input();
  input.x_t = at::randn({2, 9, 8, 8});
  EXPECT_ERROR(denoiser->forward(input), "expected x_t of shape (B, 4, H, W)");
}

TEST(Unet, OriginalKeysAreAPermutation) {
  for (const auto& [name, preset] : unet_presets()) {
    const UnetConfig config = parse_unet_config(preset);
    const auto denoiser = build_unet(config, {.device = at::kMeta, .outline = true});
    std::set<std::string> originals;
    for (const auto& parameter : denoiser->parameters())
      originals.insert(original_unet_key(config, parameter->key));
    EXPECT_EQ(originals.size(), 686u) << name;
    EXPECT_TRUE(originals.contains("model.diffusion_model.output_blocks.5.2.conv.weight"));
    EXPECT_TRUE(originals.contains("model.diffusion_model.input_blocks.3.0.op.bias"));
    EXPECT_TRUE(originals.contains(
        "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.ff.net.0.proj.weight"));
  }
}

LoraLayer random_lora(const std::string& module, at::IntArrayRef down, at::IntArrayRef up) {
  return {.module = module, .down = at::randn(down), .up = at::randn(up), .scale = 0.5};
}

// What a merged weight gives is what the layer and its adapter give.
TEST(Lora, MergedWeightsGiveWhatTheAdapterGives) {
  const at::NoGradGuard no_grad;
  at::manual_seed(3);
  const std::vector<LoraLayer> layers = {
      random_lora("conv_in", {2, 4, 3, 3}, {8, 2, 1, 1}),
      random_lora("mid_block.attentions.0.transformer_blocks.0.attn1.to_k", {3, 16}, {16, 3}),
      random_lora("mid_block.attentions.0.transformer_blocks.0.attn2.to_v", {3, 12}, {16, 3})};
  const auto adapted = random_unet(), merged = random_unet();
  const at::Tensor before = adapted->forward(unet_input());
  const ParameterList adapters = attach_lora(*adapted, layers);
  ASSERT_EQ(adapters.size(), 6u);
  for (const auto& parameter : adapted->parameters())
    EXPECT_EQ(parameter->trainable, parameter->key.starts_with("base_model.model.")) << parameter->key;
  std::map<std::string, at::Tensor> weights;
  for (const auto& parameter : merged->parameters()) weights[parameter->key] = parameter->value.clone();
  merge_lora(weights, layers);
  load_weights(*merged, weights, "merged");
  const at::Tensor with_adapter = adapted->forward(unet_input()), with_merged = merged->forward(unet_input());
  EXPECT_GT((with_adapter - before).norm().item<double>(), 0.01 * before.norm().item<double>());
  EXPECT_LT((with_adapter - with_merged).norm().item<double>(), 1e-5 * with_merged.norm().item<double>());
}

// Each weight would round the sum to its own few bits.
TEST(Lora, MergesInF32) {
  std::map<std::string, at::Tensor> weights = {{"q.weight", at::ones({2, 3}, at::kBFloat16)}};
  merge_lora(weights, {{.module = "q", .down = at::full({1, 3}, 1e-3), .up = at::ones({2, 1})}});
  EXPECT_TRUE(at::equal(weights["q.weight"], at::full({2, 3}, 1e-3) + 1));
}

// Several modules may lie in one weight, as the rows of a fused projection do.
TEST(Lora, ReachesRowsOfAWeight) {
  std::map<std::string, at::Tensor> weights = {{"qkv.weight", at::zeros({6, 3})}};
  LoraLayer layer{.module = "to_k", .down = at::ones({1, 3}), .up = at::ones({2, 1})};
  merge_lora(weights, {layer}, [](const std::string&) {
    return LoraTarget{.weight_key = "qkv.weight", .first_row = 2, .num_rows = 2};
  });
  EXPECT_TRUE(at::equal(weights["qkv.weight"].sum(1), at::tensor({0.f, 0.f, 3.f, 3.f, 0.f, 0.f})));
}

TEST(Lora, AnotherBaseIsRefused) {
  const auto denoiser = random_unet();
  EXPECT_ERROR(attach_lora(*denoiser, {random_lora("blocks.0.to_q", {2, 4}, {8, 2})}),
               "the model lacks 1 of its 1 modules (blocks.0.to_q)");
  EXPECT_ERROR(attach_lora(*denoiser, {random_lora("conv_in", {2, 4}, {8, 2})}),
               "conv_in: lora_A (2, 4) and lora_B (8, 2) do not fit a weight (8, 4, 3, 3)");
}

}  // namespace
}  // namespace kiln
