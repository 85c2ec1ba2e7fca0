#include "extract/image_batches.h"

#include "core/aten.h"
#include "data/test_images.h"
#include "extract/extract.h"
#include "extract/picture_lanes.h"
#include "extract/settings.h"
#include "models/autoencoders/autoencoder_kl.h"

namespace kiln {
namespace {

using test::make_picture;

constexpr int64_t kSize = 8;

void write_classes(const TempFolder& folder, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    test::write_picture(folder / fmt::format("images/{}/{:02}.png", i % 3, i),
                        make_picture(10 + i, 17, static_cast<uint32_t>(i)));
}

BatchOptions options_of(int num_threads) {
  return {.seed = 7,
          .global_batch = 6,
          .rank = 1,
          .world_size = 2,
          .class_dropout_prob = 0.3,
          .null_class = 3,
          .num_threads = num_threads};
}

Pictures pictures_of(const PictureLaneOptions& options, int64_t downsample = 1) {
  Pictures pictures{
      .images = std::make_shared<const RunPictures>(ImageDataset::open(options.data), RunPictures::Options()),
      .lanes = nullptr};
  ProcessGroup alone;
  pictures.lanes = std::make_shared<const PictureLanes>(options, *pictures.images, downsample, alone);
  return pictures;
}

Pictures squares_of(const TempFolder& folder, int64_t downsample = 1) {
  return pictures_of({.data = folder / "images", .image_size = kSize, .buckets = ""}, downsample);
}

std::unique_ptr<BatchSource> open_images(const TempFolder& folder, const BatchOptions& options) {
  return image_batches(squares_of(folder), load_autoencoder("pixels", at::kCPU, at::kFloat), at::kCPU,
                       options);
}

// The samples' names stand for their ids: those of a store are others where its lanes put them in another
// order.
void expect_equal_batches(BatchSource& found_source, BatchSource& expected_source,
                          const ImageDataset& pictures, const FeatureStore& store) {
  const auto expected = expected_source.next(), found = found_source.next();
  EXPECT_EQ(found->first_position, expected->first_position);
  EXPECT_EQ(found->shape.lane, expected->shape.lane);
  for (int64_t row = 0; row < expected->size(); ++row)
    EXPECT_EQ(pictures.records()[found->sample_ids[row]].name, store.sample_name(expected->sample_ids[row]));
  EXPECT_EQ(found->class_labels, expected->class_labels);
  EXPECT_EQ(found->time_uniform, expected->time_uniform);
  EXPECT_EQ(found->image_hw, expected->image_hw);
  EXPECT_EQ(found->aspect_ratio, expected->aspect_ratio);
  EXPECT_EQ(found->noise, expected->noise);
  EXPECT_EQ(found->x_0, expected->x_0);
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
    const auto store = FeatureStore::open(extraction.out);
    BatchOptions draws = options_of(1), threaded = options_of(3);
    draws.has_halo = threaded.has_halo = std::string_view(flip) == "both";
    const auto stored = store_batches(store, draws);
    const auto direct = open_images(folder, threaded);
    for (auto* source : {stored.get(), direct.get()}) source->seek(12);
    EXPECT_EQ(direct->order().samples_per_epoch(), 11);
    for (int step = 0; step < 5; ++step)  // over the end of an epoch
      expect_equal_batches(*direct, *stored, *squares_of(folder).images, *store);
  }
}

// Pictures of many shapes, some too small for their bucket or unreadable: each rank's batches, all draws and
// sizes included, wherever the stream is entered, and those of a single lane.
TEST(ImageBatches, OfBucketsAreTheBatchesOfTheirStoreBitForBit) {
  const TempFolder folder;
  const std::pair<int64_t, int64_t> sizes[] = {{20, 22}, {16, 40}, {50, 24}, {20, 21}, {9, 30}};
  for (int64_t i = 0; i < 37; ++i) {
    const auto [height, width] = sizes[i * i % 5];
    test::write_picture(folder / fmt::format("images/{}/{:02}.png", i % 3, i),
                        make_picture(height + i % 2, width + i % 3, static_cast<uint32_t>(i)));
  }
  test::write_picture(folder / "images/1/small.png", make_picture(10, 10));
  test::write_file(folder / "images/1/unreadable.png", "nothing");
  ExtractOptions extraction;
  extraction.data = folder / "images";
  extraction.autoencoder = "pixels";
  extraction.out = folder / "store";
  extraction.buckets = "16x16,8x24,32x16,8x80";
  extraction.bucket_min = 8;
  extraction.flip = "both";
  extraction.device = "cpu";
  ProcessGroup alone;
  extract(extraction, alone);
  const auto store = FeatureStore::open(extraction.out);
  ASSERT_GE(store->info().lanes.size(), 2U);
  const Pictures pictures =
      pictures_of({.data = extraction.data, .buckets = extraction.buckets, .bucket_min = 8});
  EXPECT_EQ(pictures.lanes->latent_lanes(), store->info().lanes);
  EXPECT_EQ(pictures.images->all_left_out().size(), 1U) << "known from its header";
  EXPECT_EQ(pictures.lanes->skipped().size(), 1U) << "smaller than its bucket";
  const std::shared_ptr<const Autoencoder> pixels = load_autoencoder("pixels", at::kCPU, at::kFloat);
  for (const int64_t rank : {0, 1})
    for (const std::optional<int64_t> lane : {std::optional<int64_t>(), std::optional<int64_t>(1)}) {
      BatchOptions options = options_of(2);
      options.rank = rank;
      options.only_lane = lane;
      const auto stored = store_batches(store, options);
      const auto direct = image_batches(pictures, pixels, at::kCPU, options);
      EXPECT_EQ(direct->order().samples_per_epoch(), stored->order().samples_per_epoch());
      for (const int64_t position : {int64_t{0}, int64_t{30}}) {
        for (auto* source : {stored.get(), direct.get()}) source->seek(position);
        for (int step = 0; step < 8; ++step) expect_equal_batches(*direct, *stored, *pictures.images, *store);
      }
    }
  EXPECT_ERROR(pictures_of({.data = extraction.data, .buckets = "512x512"}), "none of the 38 pictures",
               "--enlarge");
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
    return image_batches(squares_of(folder, kl->downsample),
                         std::make_shared<CountingAutoencoder>(autoencoder), at::kCPU, options,
                         images_at_once)
        ->next();
  };
  const auto whole = batch_of(0);
  EXPECT_THAT(*autoencoder.sizes, testing::ElementsAre(5));
  const auto slices = batch_of(2);
  EXPECT_THAT(*autoencoder.sizes, testing::ElementsAre(2, 2, 1));
  EXPECT_THAT(slices->x_0, testing::Pointwise(testing::FloatNear(1e-5f), whole->x_0));
  EXPECT_EQ(slices->noise, whole->noise);
  options.has_halo = true;  // whose picture takes no more memory
  const auto with_halo = batch_of(0);
  EXPECT_THAT(*autoencoder.sizes, testing::ElementsAre(5, 1));
  EXPECT_EQ(with_halo->x_0.size() * 5, whole->x_0.size() * 6);
}

// Writes a PNG whose header is whole and whose pixels end in the middle.
void cut_picture(const std::string& path) {
  const std::string bytes = test::read_bytes(path);
  test::write_bytes(path, bytes.substr(0, bytes.size() / 2));
}

// What decoding shows to be broken is replaced by the next in the order: the same for every rank, thread and
// place where the stream is entered, with the label of what is shown.
TEST(Friction24, BrokenPicturesAreReplacedAlikeForAllThreadsAndPlaces) {
  const TempFolder folder;
  write_classes(folder, 9);
  cut_picture(folder / "images/1/04.png");
  cut_picture(folder / "images/2/05.png");
  const Pictures pictures = squares_of(folder);
  const std::shared_ptr<const Autoencoder> pixels = load_autoencoder("pixels", at::kCPU, at::kFloat);
  BatchOptions options = options_of(1);
  options.class_dropout_prob = 0;
  options.rank = 0;
  options.world_size = 1;
  const auto whole = image_batches(pictures, pixels, at::kCPU, options);
  std::vector<std::shared_ptr<const Batch>> batches;
  for (int step = 0; step < 6; ++step) batches.push_back(whole->next());
  for (const auto& batch : batches)
    for (int64_t row = 0; row < batch->size(); ++row) {
      const ImageRecord& record = pictures.images->records()[batch->sample_ids[row]];
      EXPECT_NE(record.name, "1/04.png");
      EXPECT_NE(record.name, "2/05.png");
      EXPECT_EQ(batch->class_labels[row], record.label);
    }
  std::vector<std::string> names;
  for (const SkippedPicture& picture : pictures.images->take_new_left_out()) {
    names.push_back(picture.name);
    EXPECT_THAT(picture.why, HasSubstr(picture.name));
  }
  EXPECT_THAT(names, testing::UnorderedElementsAre("1/04.png", "2/05.png"));
  EXPECT_TRUE(pictures.images->take_new_left_out().empty());
  options.num_threads = 3;
  const auto later = image_batches(squares_of(folder), pixels, at::kCPU, options);
  later->seek(18);
  for (int step = 3; step < 6; ++step) {
    const auto batch = later->next();
    EXPECT_EQ(batch->sample_ids, batches[step]->sample_ids);
    EXPECT_EQ(batch->x_0, batches[step]->x_0);
  }
  EXPECT_ERROR(check_image_size(1, 0), "1 to 65536, got 0");
}

TEST(Friction24, ALaneWithoutAPictureThatCanBeDecodedIsAnError) {
  const TempFolder folder;
  write_classes(folder, 3);
  for (const char* name : {"0/00.png", "1/01.png", "2/02.png"}) cut_picture(folder / "images/" + name);
  const auto direct = open_images(folder, options_of(1));
  EXPECT_ERROR(direct->next(), "no picture of a shape can be decoded");
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
