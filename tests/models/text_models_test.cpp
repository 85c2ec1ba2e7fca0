// PixArt and Sana as the trainer and the sampler use them: segment by segment, with weights of other dtypes,
// on device meta, on ragged captions. tests/reference/test_pixart.py and test_sana.py hold their numbers
// against other implementations.

#include "models/denoiser_checks.h"
#include "models/registry.h"

namespace kiln {
namespace {

using nlohmann::json;

constexpr int64_t kBatch = 3, kTextWidth = 20, kMaxRows = 5;

struct TextModel {
  const char* label;
  const char* name;
  const char* config;
};
const TextModel kModels[] = {
    {"Pixart", "pixart",
     R"({"input_size": 8, "hidden_size": 48, "depth": 2, "num_heads": 3, "caption_channels": 20,
         "model_max_length": 5})"},
    {"PixartWithEverything", "pixart",
     R"({"input_size": 8, "hidden_size": 48, "depth": 2, "num_heads": 3, "caption_channels": 20,
         "model_max_length": 5, "micro_condition": true, "qk_norm": true, "pred_sigma": false,
         "kv_compress_config": {"sampling": "conv", "scale_factor": 2, "kv_compress_layer": [1]}})"},
    {"PixartDiffusers", "pixart_diffusers",
     R"({"sample_size": 8, "num_attention_heads": 3, "attention_head_dim": 16, "num_layers": 2,
         "cross_attention_dim": 48, "caption_channels": 20})"},
    {"Sana", "sana",
     R"({"sample_size": 4, "in_channels": 4, "out_channels": 4, "num_attention_heads": 3, "attention_head_dim": 8,
         "num_layers": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": 10, "cross_attention_dim": 24,
         "caption_channels": 20})"},
    {"SanaWithEverything", "sana",
     R"({"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_attention_heads": 3,
         "attention_head_dim": 8, "num_layers": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": 10,
         "cross_attention_dim": 24, "caption_channels": 20, "qk_norm": "rms_norm_across_heads",
         "guidance_embeds": true, "interpolation_scale": 2, "attention_bias": true})"},
};

std::unique_ptr<Denoiser> random_model(const TextModel& model, at::ScalarType compute_dtype = at::kFloat) {
  auto denoiser = build_denoiser(model.name, json::parse(model.config), {.compute_dtype = compute_dtype});
  draw_trained_weights(*denoiser, 0.15, 0.3);
  return denoiser;
}

// Pictures that are not square; captions of 3, 0 and 5 rows, the last one dropped where there is a null
// caption.
ModelInput input_of(const DenoiserShape& shape) {
  at::manual_seed(0);
  ModelInput input{.x_t = at::randn({kBatch, shape.in_channels, 8, 12}),
                   .timesteps = at::rand({kBatch}) * 999};
  Conditioning& conditioning = input.conditioning;
  at::Tensor mask = at::zeros({kBatch, kMaxRows}, at::kLong);
  mask[0].narrow(0, 0, 3).fill_(1);
  mask[2].fill_(1);
  conditioning.text = text_rows_of(at::randn({kBatch, kMaxRows, kTextWidth}), mask);
  if (shape.conditioning.has_null_text)
    conditioning.text.dropped = at::tensor(std::vector<int64_t>{0, 0, 1}, at::kLong).to(at::kBool);
  if (shape.conditioning.takes_image_size) {
    conditioning.image_hw = at::rand({kBatch, 2}) * 1000;
    conditioning.aspect_ratio = at::rand({kBatch, 1}) + 0.5;
  }
  if (shape.conditioning.takes_guidance) conditioning.guidance = at::rand({kBatch}) * 5;
  return input;
}

class TextModels : public testing::TestWithParam<TextModel> {};

TEST_P(TextModels, SegmentsAreEmbedBlocksFinal) {
  const auto denoiser =
      build_denoiser(GetParam().name, json::parse(GetParam().config), {.device = at::kMeta});
  EXPECT_THAT(names_of_segments(*denoiser), ElementsAre("embed", "blocks.0", "blocks.1", "final"));
  EXPECT_EQ(denoiser->shape().conditioning.text_width, kTextWidth);
  EXPECT_GT(denoiser->shape().size_multiple, 0);
}

TEST_P(TextModels, SegmentWalkEqualsPlainAutogradBitwise) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    SCOPED_TRACE(c10::toString(dtype));
    const auto denoiser = random_model(GetParam(), dtype);
    expect_walk_equals_plain_autograd(*denoiser, input_of(denoiser->shape()));
  }
}

TEST_P(TextModels, ForwardIsPure) {
  const at::NoGradGuard no_grad;
  const auto denoiser = random_model(GetParam());
  const ModelInput input = input_of(denoiser->shape());
  EXPECT_TRUE(at::equal(denoiser->forward(input), denoiser->forward(input)));
}

TEST_P(TextModels, WeightsMayBeRebound) {
  const auto denoiser = random_model(GetParam(), at::kBFloat16);
  expect_weights_may_be_rebound(*denoiser, input_of(denoiser->shape()), 3e-2);
}

TEST_P(TextModels, RunsOnMetaWithTheShapesAndDtypesOfTheCpu) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto real = random_model(GetParam(), dtype);
    const auto meta = build_denoiser(GetParam().name, json::parse(GetParam().config),
                                     {.device = at::kMeta, .compute_dtype = dtype});
    expect_the_same_on_meta(*real, *meta, input_of(real->shape()));
  }
}

// A sample's prediction does not depend on what else is in the batch, nor on how captions are padded.
TEST_P(TextModels, SamplesOfABatchAreIndependent) {
  const at::NoGradGuard no_grad;
  const auto denoiser = random_model(GetParam());
  const ModelInput input = input_of(denoiser->shape());
  const at::Tensor all = denoiser->forward(input);
  for (int64_t b = 0; b < kBatch; ++b) {
    const at::Tensor one = denoiser->forward({.x_t = input.x_t.narrow(0, b, 1),
                                              .timesteps = input.timesteps.narrow(0, b, 1),
                                              .conditioning = slice_rows(input.conditioning, b, 1)});
    EXPECT_LT((one[0] - all[b]).abs().max().item<double>(), 1e-4);
  }
  const Conditioning twice = joined(input.conditioning, input.conditioning);
  const at::Tensor doubled = denoiser->forward({.x_t = at::cat({input.x_t, input.x_t}),
                                                .timesteps = at::cat({input.timesteps, input.timesteps}),
                                                .conditioning = twice});
  EXPECT_LT((doubled.narrow(0, kBatch, kBatch) - all).abs().max().item<double>(), 1e-4);
}

TEST_P(TextModels, InputsThatDoNotFitAreRefused) {
  const auto denoiser = random_model(GetParam());
  ModelInput input = input_of(denoiser->shape());
  input.conditioning.text = TextRows();
  EXPECT_ERROR(denoiser->forward(input), "captions are missing");
  input = input_of(denoiser->shape());
  input.conditioning.text = text_rows_of(at::randn({kBatch, 2, 7}), {});
  EXPECT_ERROR(denoiser->forward(input), "expected captions of width 20, got 7");
  input = input_of(denoiser->shape());
  input.x_t = at::randn({kBatch, 3, 8, 8});
  EXPECT_ERROR(denoiser->forward(input), "expected x_t of shape (B, 4, H, W)");
}

TEST_P(TextModels, ResolvedConfigIsCompleteAndBuildsTheSame) {
  const json resolved = resolve_denoiser_config(GetParam().name, json::parse(GetParam().config));
  EXPECT_EQ(resolve_denoiser_config(GetParam().name, resolved), resolved);
  const auto denoiser =
      build_denoiser(GetParam().name, json::parse(GetParam().config), {.device = at::kMeta});
  const auto of_resolved = build_denoiser(GetParam().name, resolved, {.device = at::kMeta});
  std::vector<std::string> keys, again;
  for (const auto& p : denoiser->parameters()) keys.push_back(p->key);
  for (const auto& p : of_resolved->parameters()) again.push_back(p->key);
  EXPECT_EQ(keys, again);
}

TEST_P(TextModels, ShapesOfItsWeightsTellWhatAConfigLeavesOpen) {
  const json resolved = resolve_denoiser_config(GetParam().name, json::parse(GetParam().config));
  if (std::string(GetParam().name) == "pixart_diffusers") return;  // its config lies beside the weights
  WeightShapes shapes;
  const auto denoiser = build_denoiser(GetParam().name, resolved, {.device = at::kMeta});
  for (const auto& p : denoiser->parameters()) shapes[p->key] = p->value.sizes().vec();
  json known;  // what no shape tells
  for (const char* key : {"num_heads", "sample_size", "attention_head_dim", "num_cross_attention_heads",
                          "cross_attention_head_dim", "interpolation_scale"})
    if (resolved.contains(key)) known[key] = resolved[key];
  EXPECT_EQ(resolve_denoiser_config(GetParam().name, known, shapes), resolved);
}

INSTANTIATE_TEST_SUITE_P(All, TextModels, testing::ValuesIn(kModels),
                         [](const auto& info) { return std::string(info.param.label); });

TEST(PixartCaptions, DroppedOnesBecomeTheNullRowsAtTheirPlaces) {
  const at::NoGradGuard no_grad;
  const auto denoiser = random_model(kModels[0]);
  at::Tensor null_rows;
  for (const auto& parameter : denoiser->parameters())
    if (parameter->key == "y_embedder.y_embedding") null_rows = parameter->value;
  ModelInput input = input_of(denoiser->shape());
  at::Tensor mask = at::zeros({kBatch, kMaxRows}, at::kLong);
  mask.select(1, 1).fill_(1);  // a mask with a gap
  mask.select(1, 4).fill_(1);
  at::Tensor embeds = at::randn({kBatch, kMaxRows, kTextWidth});
  input.conditioning.text = text_rows_of(embeds, mask);
  input.conditioning.text.dropped = at::tensor(std::vector<int64_t>{0, 1, 0}, at::kLong).to(at::kBool);
  const at::Tensor dropped = denoiser->forward(input);
  embeds[1].copy_(null_rows);
  input.conditioning.text = text_rows_of(embeds, mask);
  EXPECT_TRUE(at::equal(denoiser->forward(input), dropped));
}

TEST(PixartCaptions, LongerThanTheNullCaptionTheyCannotBeDropped) {
  const auto denoiser = random_model(kModels[0]);
  ModelInput input = input_of(denoiser->shape());
  input.conditioning.text = text_rows_of(at::randn({kBatch, 7, kTextWidth}), {});
  denoiser->forward(input);
  input.conditioning.text.dropped = at::zeros({kBatch}, at::kBool);
  EXPECT_ERROR(denoiser->forward(input), "a caption has 7 rows: the model's null caption has 5");
}

TEST(PixartOfOneSize, UsesItsStoredPositions) {
  const at::NoGradGuard no_grad;
  json config = json::parse(kModels[0].config);
  config["variant"] = "PixArt";
  const auto denoiser = build_denoiser("pixart", config);
  initialize_weights(*denoiser, 0);
  EXPECT_EQ(denoiser->shape().size_multiple, 0);
  ModelInput input = input_of(denoiser->shape());
  EXPECT_ERROR(denoiser->forward(input), "expected x_t of shape (B, 4, 8, 8)");
}

// What building a model of that config with this change says.
std::string error_of_change(const char* family, size_t model, const json& change) {
  json config = json::parse(kModels[model].config);
  config.update(change);
  return message_of([&] { build_denoiser(family, config, {.device = at::kMeta}); });
}

TEST(PixartConfig, NamesWhatIsWrong) {
  const auto pixart = [](const json& change) { return error_of_change("pixart", 0, change); };
  EXPECT_THAT(pixart({{"hiden_size", 3}}), HasSubstr("hiden_size"));
  EXPECT_THAT(pixart({{"num_heads", 5}}), HasSubstr("expected hidden_size divisible by num_heads 5, got 48"));
  EXPECT_THAT(pixart({{"variant", "PixArtXS"}}), HasSubstr("variant"));
  EXPECT_THAT(pixart({{"kv_compress_config",
                       {{"sampling", "conv"}, {"scale_factor", 2}, {"kv_compress_layer", {7}}}}}),
              HasSubstr("expected kv_compress_layer in 0..1, got 7"));
  EXPECT_THAT(pixart({{"kv_compress_config", {{"scale_factor", 2}, {"kv_compress_layer", {1}}}}}),
              HasSubstr("kv_compress_config.sampling"));
}

TEST(SanaConfig, NamesWhatIsWrong) {
  const auto sana = [](const json& change) { return error_of_change("sana", 3, change); };
  EXPECT_THAT(sana({{"cross_attention_dim", 99}}), HasSubstr("expected cross_attention_dim 24"));
  EXPECT_THAT(sana({{"qk_norm", "layer_norm"}}), HasSubstr("qk_norm"));
  EXPECT_THAT(sana({{"_class_name", "DiTTransformer2DModel"}}), HasSubstr("SanaTransformer2DModel"));
}

// Counts of 0 and a patch embedding that is no convolution are not divided by.
TEST(CompletedConfig, LeavesImpossibleCountsForTheParserToRefuse) {
  for (const auto& [model, patch, key] :
       {std::tuple{"sana", "patch_embed.proj.weight", "attention_head_dim"},
        {"sana", "patch_embed.proj.weight", "num_cross_attention_heads"},
        {"pixart_diffusers", "pos_embed.proj.weight", "num_attention_heads"}}) {
    const auto complete = family_of(model).complete;
    const WeightShapes shapes = {{patch, {64, 4, 1, 1}},
                                 {"transformer_blocks.0.attn2.to_q.weight", {64, 64}}};
    EXPECT_EQ(complete({{key, 0}}, shapes).at(key), 0);
    EXPECT_ERROR(family_of(model).resolve({{key, 0}}), key);
    EXPECT_EQ(complete(json::object(), {{patch, {64, 4}}}), json::object());
  }
}

TEST(CompletedConfig, SaysNothingOfCaptionsThatAFileLacks) {
  const auto complete = family_of("pixart_diffusers").complete;
  WeightShapes shapes = {{"pos_embed.proj.weight", {64, 4, 2, 2}}};
  EXPECT_EQ(complete(json::object(), shapes).at("patch_size"), 2);
  EXPECT_FALSE(complete(json::object(), shapes).contains("caption_channels"));
  shapes["caption_projection.linear_1.weight"] = {64, 48};
  EXPECT_EQ(complete(json::object(), shapes).at("caption_channels"), 48);
}

}  // namespace
}  // namespace kiln
