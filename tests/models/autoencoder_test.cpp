// Loading of autoencoders, and what extraction and sampling rely on. tests/reference/test_autoencoder_kl.py
// holds the numbers against diffusers.
#include "models/autoencoders/autoencoder.h"

#include <c10/core/InferenceMode.h>

#include "checkpoint/tensor_files.h"
#include "core/allocations.h"
#include "core/dry_run.h"
#include "core/json.h"
#include "models/autoencoders/autoencoder_kl.h"
#include "models/autoencoders/tiling.h"
#include "models/denoiser_checks.h"
#include "models/weights.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using Tensors = std::map<std::string, at::Tensor>;

const nlohmann::json kTinyAutoencoder = {{"_class_name", "AutoencoderKL"},
                                         {"block_out_channels", {8, 16}},
                                         {"norm_num_groups", 4},
                                         {"layers_per_block", 1},
                                         {"latent_channels", 4},
                                         {"scaling_factor", 0.13025},
                                         {"shift_factor", 0.25}};

Tensors tiny_weights() {
  const AutoencoderKl autoencoder(parse_autoencoder_kl_config(kTinyAutoencoder), {});
  initialize_weights(autoencoder.parameters(), 3);
  Tensors weights;
  for (const auto& parameter : autoencoder.parameters()) weights[parameter->key] = parameter->value;
  return weights;
}

Tensors with_old_keys(const Tensors& weights) {
  Tensors old;
  for (const auto& [key, weight] : weights) {
    std::string renamed = key;
    for (const auto& [name, old_name] : std::map<std::string, std::string>{{".to_q.", ".query."},
                                                                           {".to_k.", ".key."},
                                                                           {".to_v.", ".value."},
                                                                           {".to_out.0.", ".proj_attn."}})
      if (const size_t at = renamed.find(name); at != std::string::npos)
        renamed.replace(at, name.size(), old_name);
    old[renamed] = renamed != key && weight.dim() == 2 ? weight.unsqueeze(2).unsqueeze(3) : weight;
  }
  return old;
}

class LoadAutoencoder : public testing::Test {
 protected:
  void write_config(const nlohmann::json& config, const fs::path& folder) {
    fs::create_directories(folder);
    std::ofstream(folder / "config.json") << config;
  }
  std::string write_folder(const std::string& name, const nlohmann::json& config, const Tensors& weights) {
    write_config(config, folder_ / name);
    save_tensors((folder_ / name / "diffusion_pytorch_model.safetensors").string(), weights);
    return (folder_ / name).string();
  }
  std::unique_ptr<Autoencoder> load(const std::string& path) {
    return load_autoencoder(path, at::kCPU, at::kFloat);
  }

  test::TempFolder temporary_;
  fs::path folder_ = temporary_.path();
};

TEST_F(LoadAutoencoder, ReadsAFolderAFileAndAPipeline) {
  const std::string folder = write_folder("vae", kTinyAutoencoder, tiny_weights());
  std::ofstream(folder_ / "model_index.json") << "{}";
  const auto autoencoder = load(folder);
  EXPECT_EQ(autoencoder->name, "autoencoder_kl");
  EXPECT_EQ(autoencoder->latent_channels, 4);
  EXPECT_EQ(autoencoder->downsample, 2);
  EXPECT_EQ(autoencoder->scaling_factor, 0.13025);
  EXPECT_EQ(autoencoder->shift_factor, 0.25);
  EXPECT_EQ(load(folder + "/diffusion_pytorch_model.safetensors")->fingerprint, autoencoder->fingerprint);
  EXPECT_EQ(load(folder_.string())->fingerprint, autoencoder->fingerprint);

  const c10::InferenceMode inference;
  const at::Tensor moments = autoencoder->encode(at::rand({2, 3, 8, 6}) * 2 - 1);
  EXPECT_EQ(moments.sizes(), (std::vector<int64_t>{2, 8, 4, 3}));
  EXPECT_TRUE(moments.is_contiguous());
  const at::Tensor images = autoencoder->decode(moments.slice(1, 0, 4));
  EXPECT_EQ(images.sizes(), (std::vector<int64_t>{2, 3, 8, 6}));
  EXPECT_TRUE(images.is_contiguous());
}

TEST_F(LoadAutoencoder, BothKeyGenerationsAreTheSameAutoencoder) {
  const auto current = load(write_folder("current", kTinyAutoencoder, tiny_weights()));
  const auto old = load(write_folder("old", kTinyAutoencoder, with_old_keys(tiny_weights())));
  EXPECT_EQ(current->fingerprint, old->fingerprint);
  const c10::InferenceMode inference;
  const at::Tensor images = at::rand({1, 3, 8, 8});
  EXPECT_TRUE(at::equal(current->encode(images), old->encode(images)));
}

TEST_F(LoadAutoencoder, FingerprintFollowsTheWeightsNotTheComputeDtype) {
  const std::string folder = write_folder("vae", kTinyAutoencoder, tiny_weights());
  const auto f32 = load(folder), bf16 = load_autoencoder(folder, at::kCPU, at::kBFloat16);
  EXPECT_EQ(f32->fingerprint, bf16->fingerprint);
  Tensors changed = tiny_weights();
  changed["decoder.conv_out.bias"] = changed["decoder.conv_out.bias"].clone();
  changed["decoder.conv_out.bias"][0] += 1e-3;
  EXPECT_NE(load(write_folder("changed", kTinyAutoencoder, changed))->fingerprint, f32->fingerprint);
}

TEST_F(LoadAutoencoder, LowPrecisionIsCloseToF32) {
  const std::string folder = write_folder("vae", kTinyAutoencoder, tiny_weights());
  const c10::InferenceMode inference;
  const at::Tensor images = at::rand({2, 3, 16, 16}) * 2 - 1;
  const at::Tensor expected = load(folder)->encode(images);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor moments = load_autoencoder(folder, at::kCPU, dtype)->encode(images);
    EXPECT_EQ(moments.scalar_type(), at::kFloat);
    EXPECT_LT((moments - expected).norm().item<double>() / expected.norm().item<double>(), 6e-2);
  }
}

TEST_F(LoadAutoencoder, PixelsAreTheirOwnLatents) {
  const auto pixels = load("pixels");
  EXPECT_EQ(pixels->fingerprint, "none");
  EXPECT_EQ(pixels->latent_channels, 3);
  EXPECT_EQ(pixels->downsample, 1);
  const at::Tensor images = at::rand({2, 3, 5, 7});
  EXPECT_FALSE(pixels->has_posterior);
  EXPECT_TRUE(at::equal(pixels->encode(images), images));
  EXPECT_TRUE(at::equal(pixels->decode(images), images));
}

TEST_F(LoadAutoencoder, ErrorsSayWhatIsWrong) {
  EXPECT_ERROR(load(folder_ / "absent"), "absent does not exist");
  EXPECT_ERROR(load(folder_), "no config.json");
  write_config({{"_class_name", "VQModel"}}, folder_ / "vq");
  EXPECT_ERROR(load(folder_ / "vq"), "of class VQModel; known are AutoencoderKL, AutoencoderDC");
  std::ofstream(folder_ / "config.json") << "{\"a\":";
  EXPECT_ERROR(load(folder_), "is not JSON");
  write_config(kTinyAutoencoder, folder_ / "empty");
  EXPECT_ERROR(load(folder_ / "empty"), "");
}

TEST_F(LoadAutoencoder, MissingKeysAreAllListed) {
  Tensors weights = tiny_weights();
  weights.erase("encoder.conv_in.weight");
  weights.erase("post_quant_conv.bias");
  EXPECT_ERROR(load(write_folder("vae", kTinyAutoencoder, weights)), "encoder.conv_in.weight",
               "post_quant_conv.bias");
}

// Bytes that `work` takes on meta at most.
int64_t peak_on_meta(const std::function<void()>& work) {
  const c10::InferenceMode inference;
  const DryRunScope on_cpu(DryRunDevice::kCpu);
  MetaMeter meter;
  const MetaAllocationScope metering(meter);
  work();
  return meter.peak;
}

TEST_F(LoadAutoencoder, CutsPicturesForWhichThereIsNoRoom) {
  const std::string folder = write_folder("vae", kTinyAutoencoder, tiny_weights());
  const auto whole = load(folder);
  const auto with_room = [&](int64_t bytes) {
    return load_autoencoder(folder, at::kCPU, at::kFloat,
                            {.when = Tiling::When::kNoRoom, .side = 16, .room_bytes = bytes});
  };
  const c10::InferenceMode inference;
  at::manual_seed(0);
  const at::Tensor latents = at::randn({8, 4, 20, 24}), small = at::randn({2, 4, 8, 8});
  AutoencoderKl on_meta(parse_autoencoder_kl_config(kTinyAutoencoder), {.device = at::kMeta});
  on_meta.freeze_weights();
  const auto peak_of = [&](int64_t batch) {
    return peak_on_meta([&] { on_meta.decode(latents.narrow(0, 0, batch).to(at::kMeta)); });
  };
  const int64_t of_four = peak_of(4), of_eight = peak_of(8);
  ASSERT_LT(of_four, of_eight);
  EXPECT_TRUE(at::equal(with_room(of_eight)->decode(latents), whole->decode(latents)));
  EXPECT_TRUE(
      at::equal(with_room(of_four)->decode(latents),
                at::cat({whole->decode(latents.narrow(0, 0, 4)), whole->decode(latents.narrow(0, 4, 4))})));
  const at::Tensor tiled = with_room(1)->decode(latents.narrow(0, 0, 1));
  EXPECT_TRUE(at::equal(tiled, decode_tiled(*whole, latents.narrow(0, 0, 1), tiles_of(*whole, 16))));
  EXPECT_FALSE(at::equal(tiled, whole->decode(latents.narrow(0, 0, 1))));
  EXPECT_TRUE(at::equal(with_room(1)->decode(small), whole->decode(small))) << "no larger than a tile";
}

TEST_F(LoadAutoencoder, CutsPicturesLargerThanATileWhenAskedTo) {
  const std::string folder = write_folder("vae", kTinyAutoencoder, tiny_weights());
  const auto whole = load(folder);
  const auto tiled = load_autoencoder(folder, at::kCPU, at::kFloat, Tiling::parse("tiles", "16", 0));
  EXPECT_EQ(tiled->fingerprint, whole->fingerprint);
  EXPECT_EQ(tiled->scaling_factor, whole->scaling_factor);
  const c10::InferenceMode inference;
  at::manual_seed(0);
  const at::Tensor images = at::rand({1, 3, 40, 26}) * 2 - 1;
  EXPECT_TRUE(at::equal(tiled->encode(images), encode_tiled(*whole, images, {.side = 16, .stride = 12})));
  EXPECT_EQ(tiled->encode(images).sizes(), whole->encode(images).sizes());
  EXPECT_ERROR(Tiling::parse("tiles", "16px", 0), "--tiles expects auto, off");
  EXPECT_EQ(tiles_of(*whole, 6).stride, 4);  // a quarter is no whole latent
  EXPECT_ERROR(tiles_of(*whole, 7), "expected the side of a tile to be a multiple");
}

TEST(Tiles, TakeTheMemoryOfOneRowOfThem) {
  const AutoencoderKl autoencoder(parse_autoencoder_kl_config(kTinyAutoencoder), {.device = at::kMeta});
  const auto peak = [&](int64_t side, bool tiled) {
    const at::Tensor latents = at::empty({1, 4, side, side}, at::TensorOptions(at::kMeta));
    return peak_on_meta([&] {
      if (tiled)
        decode_tiled(autoencoder, latents, {.side = 64, .stride = 48});
      else
        autoencoder.decode(latents);
    });
  };
  const int64_t pictures =
      2 * 3 * 4 * (512 * 512 - 256 * 256);  // the result, and its rows before they are joined
  EXPECT_LT(peak(256, true) - peak(128, true), pictures + pictures / 4);
  EXPECT_LT(4 * peak(256, true), peak(256, false));
}

}  // namespace
}  // namespace kiln
