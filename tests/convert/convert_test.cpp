#include "convert/convert.h"
#include "core/aten.h"

#include <sys/resource.h>

#include <csignal>

#include "checkpoint/tensor_files.h"
#include "checkpoint/train_state.h"
#include "models/denoiser_checks.h"
#include "models/denoisers/dit/dit.h"
#include "models/load_model.h"
#include "models/registry.h"
#include "test_files.h"

namespace kiln {
namespace {

DitConfig small_config() {
  return {.input_size = 8, .hidden_size = 64, .depth = 2, .num_heads = 1, .num_classes = 5};
}

// Every weight drawn, so that no two tensors of a shape are equal; pos_embed as computed.
TensorMap random_weights(const DitConfig& config) {
  at::manual_seed(0);
  const auto model = build_denoiser("dit", to_json(config));
  initialize_weights(*model, 0);
  TensorMap weights;
  for (const auto& parameter : model->parameters())
    weights[parameter->key] =
        parameter->trainable ? at::randn(parameter->value.sizes()) : parameter->value.detach().clone();
  return weights;
}

WeightShapes shapes_of(const TensorMap& weights) {
  WeightShapes shapes;
  for (const auto& [key, tensor] : weights) shapes[key] = tensor.sizes().vec();
  return shapes;
}

TEST(DitArchitecture, EveryPublishedNameIsRecognised) {
  for (const auto& [name, preset] : dit_presets()) {
    if (name == "dit") continue;
    for (const int64_t input_size : {32, 64}) {
      const nlohmann::json config =
          resolve_denoiser_config(name, {{"input_size", input_size}, {"num_classes", 10}});
      const auto model = build_denoiser(name, config, {.device = at::kMeta});
      TensorMap weights;
      for (const auto& parameter : model->parameters()) weights[parameter->key] = parameter->value;
      const auto recognised = recognise_denoiser(shapes_of(weights), {});
      ASSERT_TRUE(recognised) << name;
      EXPECT_EQ(recognised->model.config, config) << name;
      EXPECT_EQ(preset_name(*recognised->family, recognised->model.config), name);
    }
  }
}

TEST(DitArchitecture, CustomSettingsAreRecognised) {
  DitConfig config = small_config();
  config.learn_sigma = false;
  config.mlp_ratio = 155.0 / 64;  // a width that the quotient does not give back exactly
  config.in_channels = 3;
  config.num_heads = 4;
  const WeightShapes shapes = shapes_of(random_weights(config));
  const auto told = recognise_denoiser(shapes, {{"num_heads", 4}}), guessed = recognise_denoiser(shapes, {});
  EXPECT_EQ(told->model.config, to_json(config));
  EXPECT_TRUE(told->model.assumed.empty());
  EXPECT_EQ(guessed->model.config["num_heads"], 1);
  EXPECT_EQ(guessed->model.assumed, std::vector<std::string>{"num_heads"});
  EXPECT_EQ(preset_name(*told->family, told->model.config), "dit");

  config.class_dropout_prob = 0;
  EXPECT_EQ(
      recognise_dit(shapes_of(random_weights(config)), {{"class_dropout_prob", 0}})->config["num_classes"],
      5);
  config.num_classes = 0;
  EXPECT_EQ(recognise_dit(shapes_of(random_weights(config)), {})->config["num_classes"], 0);
}

TEST(DitArchitecture, OthersAndMisfitsAreTold) {
  EXPECT_FALSE(recognise_denoiser({{"encoder.conv_in.weight", {128, 3, 3, 3}}}, {}));
  WeightShapes shapes = shapes_of(random_weights(small_config()));
  shapes["final_layer.linear.weight"] = {17, 64};
  EXPECT_ERROR(recognise_dit(shapes, {}), "expected 16 (noise alone) or 32 (with sigma)");
  shapes = shapes_of(random_weights(small_config()));
  shapes["pos_embed"] = {1, 15, 64};
  EXPECT_ERROR(recognise_dit(shapes, {}), "expected a square number");
  shapes["x_embedder.proj.weight"] = {100, 4, 2, 2};
  EXPECT_ERROR(recognise_dit(shapes, {}), "--num-heads");
}

TEST(DitDiffusers, GoesThereAndBack) {
  const DitConfig config = small_config();
  const TensorMap weights = random_weights(config);
  const TensorMap there = dit_to_diffusers(config, weights);
  EXPECT_FALSE(there.contains("pos_embed"));
  EXPECT_TRUE(at::equal(there.at("transformer_blocks.1.attn1.to_k.weight"),
                        weights.at("blocks.1.attn.qkv.weight").slice(0, 64, 128)));
  const TensorMap back = dit_from_diffusers(config, there, "there");
  ASSERT_EQ(back.size(), weights.size());
  for (const auto& [key, tensor] : weights) EXPECT_TRUE(at::equal(back.at(key), tensor)) << key;
  const DitConfig parsed = parse_dit_diffusers_config(dit_diffusers_config(config), "there");
  EXPECT_EQ(to_json(parsed), to_json(config));
}

TEST(DitDiffusers, MissingAndUnknownKeysAreAllListed) {
  const DitConfig config = small_config();
  TensorMap there = dit_to_diffusers(config, random_weights(config));
  there.erase("proj_out_2.bias");
  there.erase("transformer_blocks.0.attn1.to_q.bias");
  there["extra"] = at::ones({1});
  EXPECT_ERROR(dit_from_diffusers(config, there, "there"),
               "missing keys: proj_out_2.bias, transformer_blocks.0.attn1.to_q.bias", "unknown keys: extra");
}

// A folder as the trainer leaves it, with two checkpoints; the newer one is still incomplete.
void make_run(const std::string& run, const DitConfig& config, const TensorMap& weights) {
  CheckpointWriter writer(run, 10);
  save_tensors(writer.folder() + "/model.safetensors", weights);
  TensorMap ema = weights;
  ema["final_layer.linear.bias"] = weights.at("final_layer.linear.bias") + 1;
  save_tensors(writer.folder() + "/ema.safetensors", ema);
  writer.commit({.step = 10});
  std::filesystem::create_directories(run + "/checkpoints/step-00000020");
  save_tensors(run + "/checkpoints/step-00000020/model.safetensors", {{"torn", at::ones({1})}});
  test::write_bytes(run + "/config.json", nlohmann::json{{"model", "dit"},
                                                         {"model_config", to_json(config)},
                                                         {"objective", {{"type", "flow"}, {"shift", 3.0}}},
                                                         {"class_names", {"cat", "dog", "owl", "ant", "bee"}}}
                                              .dump());
}

TEST(Convert, RunFolderBecomesAPipelineWithItsSchedulerAndLabels) {
  const TempFolder folder;
  DitConfig config = small_config();
  config.num_heads = 4;
  const TensorMap weights = random_weights(config);
  make_run(folder / "run", config, weights);
  convert({.in = folder / "run", .out = folder / "pipeline"});
  const auto scheduler = read_json(folder / "pipeline/scheduler/scheduler_config.json");
  EXPECT_EQ(scheduler["_class_name"], "DPMSolverMultistepScheduler");  // which DiTPipeline's loop runs
  EXPECT_EQ(scheduler["flow_shift"], 3.0);
  EXPECT_EQ(read_json(folder / "pipeline/transformer/config.json")["num_attention_heads"], 4);
  EXPECT_EQ(read_json(folder / "pipeline/model_index.json")["id2label"]["2"], "owl");
  const auto bias = weights.at("final_layer.linear.bias");
  EXPECT_TRUE(at::equal(load_tensors(folder / "pipeline/transformer").at("proj_out_2.bias"), bias + 1))
      << "the EMA";
  convert(
      {.in = folder / "run/checkpoints/step-00000010/", .out = folder / "model.safetensors", .ema = false});
  EXPECT_TRUE(at::equal(load_tensors(folder / "model.safetensors").at("final_layer.linear.bias"), bias));
  EXPECT_EQ(find_weights(folder / "run/checkpoints/step-00000010/ema.safetensors").record.model, "dit");
}

// Shapes do not tell the number of heads; a safetensors file between two folders must not lose it.
TEST(Convert, TheNumberOfHeadsSurvivesSafetensors) {
  const TempFolder folder;
  DitConfig config = small_config();
  config.num_heads = 4;
  make_run(folder / "run", config, random_weights(config));
  convert({.in = folder / "run", .out = folder / "first"});
  convert({.in = folder / "first", .out = folder / "w.safetensors"});
  convert({.in = folder / "w.safetensors", .out = folder / "second"});
  EXPECT_EQ(read_json(folder / "second/transformer/config.json")["num_attention_heads"], 4);
  // A .pt file has its record beside it. Alone the width's guess is told, and --num-heads corrects it.
  convert({.in = folder / "w.safetensors", .out = folder / "w.pt"});
  convert({.in = folder / "w.pt", .out = folder / "with_record"});
  EXPECT_EQ(read_json(folder / "with_record/transformer/config.json")["num_attention_heads"], 4);
  std::filesystem::remove(folder / "w.pt.json");
  const auto told = [&](const char* in, const char* out) {
    return stdout_of([&] { convert({.in = folder / in, .out = folder / out}); });
  };
  EXPECT_THAT(told("w.pt", "third"), HasSubstr("num_heads 1 is assumed"));
  // Nor does a guess become knowledge on its way through safetensors, and every target tells it.
  EXPECT_THAT(told("w.pt", "guessed.safetensors"), HasSubstr("num_heads 1 is assumed"));
  EXPECT_FALSE(find_weights(folder / "guessed.safetensors").record.model_config.contains("num_heads"));
  EXPECT_THAT(told("guessed.safetensors", "guessed.pt"), HasSubstr("num_heads 1 is assumed"));
  convert({.in = folder / "w.pt", .out = folder / "fourth", .num_heads = 4});
  EXPECT_EQ(read_json(folder / "fourth/transformer/config.json")["num_attention_heads"], 4);
}

// Records of earlier versions do not say how many pixels a latent has: the autoencoder does, and not the
// size that the model was built for.
TEST(Convert, ThePictureOfACardHasTheLatentsThatItsAutoencoderMakes) {
  const TempFolder folder;
  nlohmann::json config = kTinyUnet;
  config["layers_per_block"] = 1;
  ModelRecord record = {.model = "unet2d_condition",
                        .model_config = resolve_denoiser_config("unet2d_condition", config),
                        .objective = {{"type", "flow"}, {"shift", 3.0}},
                        .image_size = 128};
  const auto model = build_denoiser(record.model, config);
  initialize_weights(*model, 0);
  TensorMap weights;
  for (const auto& parameter : model->parameters()) weights[parameter->key] = parameter->value;
  for (const auto& [autoencoder, side] : {std::pair("autoencoder_kl", 16), {"autoencoder_dc", 4}}) {
    record.autoencoder.name = autoencoder;
    const std::string file = folder / "w.safetensors", out = folder / autoencoder;
    save_tensors(file, weights, metadata_of(record));
    convert({.in = file, .out = out});
    EXPECT_EQ(load_tensors(out + "/noise.safetensors").at("noise").size(-1), side);
    EXPECT_THAT(test::read_bytes(out + "/README.md"), HasSubstr("height, width = 128, 128"));
  }
}

TEST(Convert, ARunWithoutNullClassCannotBecomeAPipeline) {
  const TempFolder folder;
  DitConfig config = small_config();
  config.class_dropout_prob = 0;
  make_run(folder / "run", config, random_weights(config));
  EXPECT_ERROR(convert({.in = folder / "run", .out = folder / "pipeline"}), "no null class");
  EXPECT_EQ(folder.num_files(), 1u);
}

TEST(Convert, OptionsWithoutEffectAndUnknownNamesAreRefused) {
  const TempFolder folder;
  save_tensors(folder / "w.safetensors", random_weights(small_config()));
  const auto message = [&](ConvertOptions options) {
    options.in = folder / "w.safetensors";
    return message_of([&] { convert(options); });
  };
  EXPECT_THAT(message({.out = folder / "x.pt", .autoencoder = "vae"}), HasSubstr("--vae has no effect"));
  EXPECT_THAT(message({.out = folder / "x.npz"}), HasSubstr("expected *.pt, *.safetensors or a folder"));
  EXPECT_THAT(message({.out = folder / "x.pt", .dtype = "int8"}), HasSubstr("expected f32, bf16 or fp16"));
  EXPECT_THAT(message({.out = folder / "x", .objective = "score"}),
              HasSubstr("expected --objective to be one of"));
  EXPECT_THAT(message({.out = folder / "x", .autoencoder = folder / "no-vae"}), HasSubstr("no-vae"));
  EXPECT_EQ(folder.num_files(), 1u);
  EXPECT_ERROR(convert({.in = folder / "absent", .out = folder / "x"}), "does not exist");
  test::write_bytes(folder / "store.json", "{}");
  EXPECT_ERROR(find_weights(folder / ""), "kiln store inspect");
}

TEST(Convert, UnknownArchitecturesChangeTheirFormatOnly) {
  const TempFolder folder;
  save_tensors(folder / "vae.safetensors", {{"encoder.conv_in.weight", at::randn({8, 3, 3, 3})}});
  convert({.in = folder / "vae.safetensors", .out = folder / "vae.pt"});
  EXPECT_TRUE(at::equal(load_tensors(folder / "vae.pt").begin()->second,
                        load_tensors(folder / "vae.safetensors").begin()->second));
  EXPECT_ERROR(convert({.in = folder / "vae.pt", .out = folder / "x"}),
               "is of an architecture that has no diffusers folder here");
  EXPECT_ERROR(convert({.in = folder / "vae.pt", .out = folder / "x.pt", .model = "DiT-S/2"}),
               "does not hold a DiT-S/2");
}

TEST(Convert, AFullDiskLeavesNoFolderBehind) {
  const TempFolder folder;
  save_tensors(folder / "w.safetensors", random_weights(small_config()));
  rlimit before = {};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const auto previous = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit = {100'000, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &limit);
  const std::string message =
      message_of([&] { convert({.in = folder / "w.safetensors", .out = folder / "pipeline/"}); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, previous);
  EXPECT_THAT(message, HasSubstr("free some space"));
  EXPECT_EQ(folder.num_files(), 1u);
}

}  // namespace
}  // namespace kiln
