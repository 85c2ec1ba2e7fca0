// Every model of the registry against the published key inventories in tests/models/keys/.

#include <map>
#include <regex>
#include <set>

#include "core/aten.h"
#include "models/autoencoders/autoencoder_dc.h"
#include "models/autoencoders/autoencoder_kl.h"
#include "models/features/inception.h"
#include "models/forward_flops.h"
#include "models/piece_checks.h"
#include "models/registry.h"
#include "models/text/text_registry.h"
#include "test_files.h"

namespace kiln {
namespace {

struct Published {
  const char* name;
  const char* file;
  size_t num_tensors;
  int64_t trainable_parameters;
  double forward_gflop;  // at 256 px; the paper's Gflops (table 1) are multiply-adds: half of it
};
constexpr Published kPublished[] = {{"DiT-S/2", "dit-s-2", 132, 32865056, 2 * 6.06},
                                    {"DiT-S/4", "dit-s-4", 132, 32920448, 2 * 1.41},
                                    {"DiT-S/8", "dit-s-8", 132, 33142016, 2 * 0.36},
                                    {"DiT-B/2", "dit-b-2", 132, 130315808, 2 * 23.01},
                                    {"DiT-B/4", "dit-b-4", 132, 130426496, 2 * 5.56},
                                    {"DiT-B/8", "dit-b-8", 132, 130869248, 2 * 1.42},
                                    {"DiT-L/2", "dit-l-2", 252, 457840672, 2 * 80.71},
                                    {"DiT-L/4", "dit-l-4", 252, 457988224, 2 * 19.70},
                                    {"DiT-L/8", "dit-l-8", 252, 458578432, 2 * 5.01},
                                    {"DiT-XL/2", "dit-xl-2", 292, 674834720, 2 * 118.64},
                                    {"DiT-XL/4", "dit-xl-4", 292, 675000704, 2 * 29.05},
                                    {"DiT-XL/8", "dit-xl-8", 292, 675664640, 2 * 7.39},
                                    // Operations: counted by torch.utils.flop_counter on diffusers' model, 64
                                    // x 64 and 96 x 96 latents, 77 rows.
                                    {"sd15", "sd15-unet", 686, 859520964, 803.27},
                                    {"sd21-v", "sd21-unet", 686, 865910724, 2149.11}};

// Text-to-image models. Counts of those without a file are diffusers' own.
struct PublishedText {
  const char* name;
  const char* config;  // JSON over the preset
  const char* file;    // "": no inventory
  size_t num_tensors;
  int64_t trainable_parameters;
};
constexpr const char* kSigmaDiffusers =
    R"({"caption_channels": 4096, "use_additional_conditions": false, "interpolation_scale": 2})";
constexpr PublishedText kPublishedText[] = {
    {"PixArt-Alpha-XL/2-256", "{}", "", 437, 610856096},
    {"PixArt-Alpha-XL/2-512", "{}", "", 437, 610856096},
    {"PixArt-Alpha-XL/2-1024", "{}", "pixart-alpha-1024-micro", 445, 611349152},
    {"PixArt-Sigma-XL/2-256", "{}", "", 437, 610856096},
    {"PixArt-Sigma-XL/2-512", "{}", "pixart-sigma-512", 437, 610856096},
    {"PixArt-Sigma-XL/2-1024", "{}", "", 437, 610856096},
    {"PixArt-Sigma-XL/2-1024-KvCompress", "{}", "pixart-sigma-1024-kvcompress", 493, 610968992},
    {"PixArt-Sigma-XL/2-2K", "{}", "", 437, 610856096},
    {"pixart_diffusers", kSigmaDiffusers, "pixart-sigma-diffusers", 603, 610856096},
    {"pixart_diffusers", R"({"caption_channels": 4096})", "", 611, 611349152},
    {"Sana-600M", "{}", "sana-600m", 548, 591747872},
    {"Sana-600M-512", "{}", "", 548, 591747872},
    {"Sana-1600M", "{}", "sana-1600m", 396, 1604462752},
    {"Sana-1600M-512", "{}", "", 396, 1604462752},
    {"Sana-1600M-2K", "{}", "", 396, 1604462752},
    {"Sana-1600M-4K", "{}", "", 396, 1604462752},
    {"Sana-1.5-1600M", "{}", "", 476, 1604641952},
    {"Sana-1.5-4800M", "{}", "", 1396, 4721825952},
    {"Sana-Sprint-600M", "{}", "", 664, 593501216},
    {"Sana-Sprint-1600M", "{}", "", 480, 1610237472},
};

struct Entry {
  std::vector<int64_t> shape;
  bool trainable;
  bool operator==(const Entry&) const = default;
};
using Inventory = std::map<std::string, Entry>;

// Adds blocks.0.x to blocks.27.x for blocks.[0-27].x.
void add_keys(const std::string& key, const Entry& entry, Inventory& inventory) {
  static const std::regex kRange(R"(\[(\d+)-(\d+)\])");
  std::smatch range;
  if (!std::regex_search(key, range, kRange)) {
    inventory[key] = entry;
    return;
  }
  for (int i = std::stoi(range[1]); i <= std::stoi(range[2]); ++i)
    add_keys(range.prefix().str() + std::to_string(i) + range.suffix().str(), entry, inventory);
}

Inventory read_inventory(const std::string& file) {
  std::ifstream stream(KILN_SOURCE_DIR "/tests/models/keys/" + file + ".tsv");
  EXPECT_TRUE(stream) << file;
  Inventory inventory;
  std::string line, key, shape, kind;
  while (std::getline(stream, line)) {  // a scalar's shape is empty
    std::istringstream fields(line);
    std::getline(std::getline(std::getline(fields, key, '\t'), shape, '\t'), kind);
    Entry entry{.shape = {}, .trainable = kind == "param"};
    std::istringstream sizes(shape);
    for (std::string size; std::getline(sizes, size, ',');) entry.shape.push_back(std::stoll(size));
    add_keys(key, entry, inventory);
  }
  return inventory;
}

Inventory inventory_of(const ParameterList& parameters) {
  Inventory inventory;
  for (const auto& parameter : parameters)
    inventory[parameter->key] = {.shape = parameter->value.sizes().vec(), .trainable = parameter->trainable};
  return inventory;
}

// `published`: a model with or without an inventory.
void expect_published(const auto& published, const nlohmann::json& config) {
  const auto denoiser = build_denoiser(published.name, config, {.device = at::kMeta});
  const ParameterList parameters = denoiser->parameters();
  EXPECT_EQ(parameters.size(), published.num_tensors);
  if (*published.file) {
    EXPECT_EQ(inventory_of(parameters), read_inventory(published.file));
  }
  int64_t trainable = 0;
  for (const auto& parameter : parameters)
    if (parameter->trainable) trainable += parameter->value.numel();
  EXPECT_EQ(trainable, published.trainable_parameters);
}

class PublishedModel : public testing::TestWithParam<Published> {};

TEST_P(PublishedModel, HasThePublishedKeysShapesAndCounts) {
  ASSERT_STRNE(GetParam().file, "");
  expect_published(GetParam(), {});
}

TEST_P(PublishedModel, CountsTheOperationsOfThePaper) {
  const auto denoiser = build_denoiser(GetParam().name, {}, {.device = at::kMeta});
  const DenoiserShape& shape = denoiser->shape();
  EXPECT_NEAR(ForwardFlops(GetParam().name, {})(shape.native_extent()) / 1e9, GetParam().forward_gflop,
              0.02 * GetParam().forward_gflop + 0.02);
}

INSTANTIATE_TEST_SUITE_P(Denoisers, PublishedModel, testing::ValuesIn(kPublished), [](const auto& info) {
  std::string name = info.param.name;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !std::isalnum(c); }, '_');
  return name;
});

TEST(OwnImageSize, IsThatOfThePublishedModel) {
  const std::map<int64_t, std::vector<const char*>> published = {
      {256, {"DiT-S/8", "DiT-XL/2", "PixArt-Alpha-XL/2-256"}},
      {512, {"PixArt-Alpha-XL/2-512", "Sana-600M-512", "sd15"}},
      {768, {"sd21-v"}},
      {1024,
       {"PixArt-Alpha-XL/2-1024", "PixArt-Sigma-XL/2-1024", "PixArt-Sigma-XL/2-1024-KvCompress",
        "pixart_diffusers", "Sana-600M", "Sana-Sprint-1600M"}},
      {2048, {"PixArt-Sigma-XL/2-2K", "Sana-1600M-2K"}},
      {4096, {"Sana-1600M-4K"}}};
  for (const auto& [pixels, names] : published)
    for (const char* name : names) EXPECT_EQ(own_image_size(name), pixels) << name;
  for (const std::string& name : denoiser_names()) EXPECT_EQ(own_image_size(name) % 256, 0) << name;
  EXPECT_EQ(own_image_size("pixart", {{"input_size", 64}}), 512) << "the config says it";
  EXPECT_EQ(own_image_size("PixArt-Sigma-XL/2-1024", {{"depth", 2}}), 1024);
}

TEST(PublishedText, HasThePublishedKeysShapesAndCounts) {
  for (const PublishedText& published : kPublishedText) {
    SCOPED_TRACE(published.name);
    expect_published(published, nlohmann::json::parse(published.config));
  }
}

TEST(Registry, EveryEntryIsTested) {
  // tests/models/dit_test.cpp, text_models_test.cpp, unet_test.cpp
  std::set<std::string> tested = {"dit", "pixart", "pixart_diffusers", "sana", "unet2d_condition"};
  for (const Published& published : kPublished) tested.insert(published.name);
  for (const PublishedText& published : kPublishedText) tested.insert(published.name);
  EXPECT_THAT(denoiser_names(), testing::UnorderedElementsAreArray(tested));
}

TEST(Registry, UnknownNamesListTheKnown) {
  EXPECT_ERROR(build_denoiser("DiT-M/2", {}), "\"DiT-M/2\": did you mean", "DiT-B/2", " more");
}

TEST(Registry, ResolvedConfigIsCompleteAndBuildsTheSame) {
  const auto config = resolve_denoiser_config("DiT-B/4", {{"input_size", 64}, {"num_classes", 10}});
  EXPECT_EQ(config["hidden_size"], 768);
  EXPECT_EQ(config["input_size"], 64);
  EXPECT_EQ(config["class_dropout_prob"], 0.1);
  EXPECT_EQ(resolve_denoiser_config("DiT-B/4", {{"depth", nullptr}})["depth"], 12) << "null is the preset's";
  EXPECT_EQ(resolve_denoiser_config("dit", config), config);
  EXPECT_EQ(
      inventory_of(build_denoiser("dit", config, {.device = at::kMeta})->parameters()),
      inventory_of(build_denoiser("DiT-B/4", {{"input_size", 64}, {"num_classes", 10}}, {.device = at::kMeta})
                       ->parameters()));
}

TEST(AutoencoderDcInventory, HasThePublishedKeysAndShapes) {
  const AutoencoderDc autoencoder(parse_autoencoder_dc_config(sana_autoencoder_config()),
                                  {.device = at::kMeta});
  EXPECT_EQ(inventory_of(autoencoder.parameters()), read_inventory("dc-ae-f32c32-sana"));
  EXPECT_EQ(autoencoder.downsample, 32);
}

TEST(AutoencoderKlInventory, BothKeyGenerationsFitTheModel) {
  const AutoencoderKl autoencoder(AutoencoderKlConfig{}, {.device = at::kMeta});
  const Inventory inventory = inventory_of(autoencoder.parameters());
  EXPECT_EQ(inventory, read_inventory("sd-vae"));
  Inventory renamed;
  for (const auto& [key, entry] : read_inventory("sd-vae-oldkeys"))
    renamed[current_autoencoder_kl_key(key)] = entry;
  EXPECT_EQ(inventory, renamed);
}

TEST(InceptionInventory, HasThePublishedKeysAndShapes) {
  EXPECT_EQ(inventory_of(published_inception_parameters()), read_inventory("fid-inception"));
}

TEST(TextEncoders, HaveThePublishedKeysAndShapes) {
  for (const PublishedTextEncoder& published : published_text_encoders()) {
    const auto encoder = build_text_encoder(published.family, published.config, {.device = at::kMeta});
    EXPECT_EQ(inventory_of(encoder->parameters()), read_inventory(published.name)) << published.name;
  }
}

TEST(OtherPieces, AreToldFromDenoisersByTheirKeys) {
  const auto refuse = [](const std::string& file) {
    TensorMap weights;
    for (const auto& [key, entry] : read_inventory(file)) weights[key] = at::Tensor();
    refuse_other_piece("absent/" + file, weights);
  };
  for (const char* file : {"sd-vae", "sd-vae-oldkeys", "dc-ae-f32c32-sana"})
    EXPECT_ERROR(refuse(file), "is an autoencoder: expected a denoiser");
  for (const PublishedTextEncoder& published : published_text_encoders())
    EXPECT_ERROR(refuse(published.name), "and --text-encoder takes this piece");
  for (const Published& published : kPublished) EXPECT_NO_THROW(refuse(published.file)) << published.name;
}

TEST(TextEncoders, EveryEntryIsTested) {
  // tests/reference/test_text_encoders.py
  EXPECT_THAT(text_encoder_names(),
              testing::UnorderedElementsAre("t5_encoder", "bert", "clip_text", "gemma2"));
  EXPECT_TRUE(is_text_encoder("bert"));
  EXPECT_FALSE(is_text_encoder("dit"));
  EXPECT_THROW(build_text_encoder("bart", {}), Error);
}

}  // namespace
}  // namespace kiln
