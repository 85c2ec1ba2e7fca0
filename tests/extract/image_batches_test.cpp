#include "extract/image_batches.h"

#include "core/aten.h"
#include "data/test_images.h"
#include "extract/extract.h"
#include "extract/image_values.h"
#include "extract/settings.h"
#include "models/autoencoders/autoencoder_kl.h"

namespace kiln {
namespace {

using test::make_picture;
using test::message_of;
using test::TempFolder;
using ::testing::HasSubstr;

constexpr int64_t kSize = 8;

void write_classes(const TempFolder& folder, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    test::write_picture(folder / fmt::format("images/{}/{:02}.png", i % 3, i),
                        make_picture(10 + i, 17, static_cast<uint32_t>(i)));
}

BatchOptions options_of(int num_threads) {
  BatchOptions options;
  options.seed = 7;
  options.global_batch = 6;
  options.rank = 1;
  options.world_size = 2;
  options.class_dropout_prob = 0.3;
  options.null_class = 3;
  options.num_threads = num_threads;
  return options;
}

std::unique_ptr<BatchSource> open_images(const TempFolder& folder, const BatchOptions& options) {
  return image_batches(ImageDataset::open(folder / "images"),
                       load_autoencoder("pixels", at::kCPU, at::kFloat), at::kCPU, {.size = kSize}, options);
}

// Notes how many images it is given at once.
struct CountingAutoencoder : Autoencoder {
  explicit CountingAutoencoder(std::shared_ptr<const Autoencoder> inner)
      : Autoencoder(*inner), inner(inner) {}
  at::Tensor encode(const at::Tensor& images) const override {
    sizes->push_back(images.size(0));
    return inner->encode(images);
  }
  at::Tensor decode(const at::Tensor& raw_latents) const override { return inner->decode(raw_latents); }
  const ParameterList& parameters() const override { return inner->parameters(); }

  std::shared_ptr<const Autoencoder> inner;
  std::shared_ptr<std::vector<int64_t>> sizes = std::make_shared<std::vector<int64_t>>();
};

TEST(ImageValues, AreThoseOfToTensorAndNormalize) {
  const Image image{1, 2, {0, 128, 255, 51, 1, 2}};
  std::vector<float> values(6), mirrored(6);
  write_image_values(image, false, values);
  write_image_values(image, true, mirrored);
  EXPECT_EQ(values[0], -1.0f);
  EXPECT_EQ(values[2], (128.0f / 255.0f - 0.5f) / 0.5f);
  EXPECT_EQ(values[4], 1.0f);
  EXPECT_EQ(mirrored, (std::vector<float>{values[1], values[0], values[3], values[2], values[5], values[4]}));
}

TEST(ImageBatches, AreTheBatchesOfTheirStoreBitForBit) {
  const TempFolder folder;
  write_classes(folder, 11);
  for (const char* flip : {"none", "both"}) {  // pixels are mirrored by the loader when the store is not
    ExtractOptions extraction;
    extraction.data = folder / "images";
    extraction.autoencoder = "pixels";
    extraction.out = folder / (std::string("store-") + flip);
    extraction.image_size = kSize;
    extraction.flip = flip;
    extraction.device = "cpu";
    ProcessGroup alone;
    extract(extraction, alone);
    const auto stored = store_batches(FeatureStore::open(extraction.out), options_of(1));
    const auto direct = open_images(folder, options_of(3));
    for (auto* source : {stored.get(), direct.get()}) source->seek(12);
    EXPECT_EQ(direct->order().samples_per_epoch(), 11);
    for (int step = 0; step < 5; ++step) {  // over the end of an epoch
      const auto expected = stored->next(), found = direct->next();
      EXPECT_EQ(found->first_position, expected->first_position);
      EXPECT_EQ(found->sample_ids, expected->sample_ids);
      EXPECT_EQ(found->class_labels, expected->class_labels);
      EXPECT_EQ(found->time_uniform, expected->time_uniform);
      EXPECT_EQ(found->noise, expected->noise);
      EXPECT_EQ(found->x_0, expected->x_0);
    }
  }
}

// However many images are encoded at once: the same latents, all draws included.
TEST(ImageBatches, EncodeInSlices) {
  const TempFolder folder;
  write_classes(folder, 7);
  auto kl = std::make_shared<AutoencoderKl>(
      AutoencoderKlConfig{.block_out_channels = {32, 32}, .layers_per_block = 1}, BuildOptions{});
  at::manual_seed(1);
  for (const auto& weight : kl->parameters()) weight->value.detach().uniform_(-0.1, 0.1);
  CountingAutoencoder autoencoder(kl);
  BatchOptions options = options_of(1);
  options.global_batch = 10;  // of two ranks
  const auto batch_of = [&](int64_t images_at_once) {
    autoencoder.sizes->clear();
    return image_batches(ImageDataset::open(folder / "images"),
                         std::make_shared<CountingAutoencoder>(autoencoder), at::kCPU, {.size = kSize},
                         options, images_at_once)
        ->next();
  };
  const auto whole = batch_of(0);
  EXPECT_THAT(*autoencoder.sizes, testing::ElementsAre(5));
  const auto slices = batch_of(2);
  EXPECT_THAT(*autoencoder.sizes, testing::ElementsAre(2, 2, 1));
  EXPECT_THAT(slices->x_0, testing::Pointwise(testing::FloatNear(1e-5f), whole->x_0));
  EXPECT_EQ(slices->noise, whole->noise);
}

TEST(ImageBatches, BrokenPicturesAndImpossibleSizesAreNamed) {
  const TempFolder folder;
  write_classes(folder, 3);
  test::write_file(folder / "images/1/bad.png", "nothing");
  const auto direct = open_images(folder, options_of(1));
  EXPECT_THAT(message_of([&] {
                for (int step = 0; step < 3; ++step) direct->next();
              }),
              testing::AllOf(HasSubstr("1/bad.png"), HasSubstr("kiln extract")));
  const auto pixels = load_autoencoder("pixels", at::kCPU, at::kFloat);
  EXPECT_THAT(message_of([&] { check_image_size(*pixels, 0); }), HasSubstr("1 to 65536, got 0"));
}

// An autoencoder on these cores needs half of them; pixels need none.
TEST(ExtractSettings, DecodeOnEveryCoreWhereNothingIsEncoded) {
  ExtractOptions options;
  options.device = "cpu";
  options.autoencoder = "pixels";
  EXPECT_EQ(resolve(options, 0, 8).num_workers, 8);
  options.autoencoder = "vae";
  EXPECT_EQ(resolve(options, 0, 8).num_workers, 4);
  options.workers = 3;
  EXPECT_EQ(resolve(options, 0, 8).num_workers, 3);
}

}  // namespace
}  // namespace kiln
