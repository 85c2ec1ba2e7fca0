// What samples take on a disk, and whether they come fast enough.

#include <chrono>
#include <cstring>
#include <optional>

#include "core/units.h"
#include "data/images/image_codecs.h"
#include "plan/plan_settings.h"
#include "plan/report/report.h"
#include "plan/run/plan.h"
#include "plan/search/candidates.h"
#include "plan/search/comparison.h"
#include "test_files.h"
#include "train/dataset/store_data.h"

namespace kiln {
namespace {

constexpr int64_t kImageNet = 1'281'167;

PlanOptions pixart() {
  return test::plan_options("A100-80G", 1,
                            settings("model=PixArt-Sigma-XL/2-512 image-size=512 depth=1 compute-dtype=bf16 "
                                     "micro-batch=16"));
}

TEST(DataOutlook, TextFeaturesAreMostOfAStoreOfT5) {
  const Plan plan = make_plan(pixart());
  // T5 XXL's rows are 4096 wide and stored in 16 bits; half of at most 300 is assumed.
  EXPECT_DOUBLE_EQ(plan.samples.caption_bytes, 150.5 * 4096 * 2);
  EXPECT_NEAR(static_cast<double>(plan.samples.text_bytes), kImageNet * 150.5 * 4096 * 2, kImageNet);
  EXPECT_EQ(plan.samples.latent_bytes, kImageNet * 2 * 4 * 64 * 64 * 4);
  EXPECT_GT(plan.samples.store_bytes(), 1.2e12);
  // A dropped caption is read once for all.
  EXPECT_NEAR(plan.data_rate.bytes_per_s / plan.data_rate.images_per_s,
              2 * 4 * 64 * 64 * 4 + 0.9 * 150.5 * 4096 * 2, 1);
  for (const std::string& text : {to_text(plan), to_html(plan)}) {
    EXPECT_THAT(text, HasSubstr("text features 1471.")) << text;
    EXPECT_THAT(text, HasSubstr("1.23 MB a caption; assumed: captions of 150 of at most 300 tokens"));
  }
  const nlohmann::json json = to_json(plan).at("predicted");
  EXPECT_EQ(json.at("store_bytes"), plan.samples.store_bytes());
  EXPECT_EQ(json.at("samples").at("text_bytes"), plan.samples.text_bytes);
}

TEST(DataOutlook, PaddedCaptionsAreNoAssumption) {
  const Plan plan = make_plan(test::plan_options(
      "A100-80G", 1,
      settings("model=sd15 image-size=512 objective=epsilon compute-dtype=bf16 global-batch=4")));
  EXPECT_DOUBLE_EQ(plan.samples.caption_bytes, 77 * 768 * 2);
  EXPECT_EQ(plan.samples.assumed, "");
}

TEST(DataOutlook, SearchAndStagesSayIt) {
  ComparisonOptions options{
      .search = {.plan = pixart()}, .models = {"PixArt-Sigma-XL/2-512"}, .gpus = {"A100-80G"}};
  options.search.fixed = {"micro-batch", "compute-dtype", "recompute", "zero-stage", "offload-optimizer"};
  const Comparison comparison = compare_runs(options);
  EXPECT_THAT(to_text(comparison), has_all("data GiB", "6.34 MJHQ"));
  const nlohmann::json row = to_json(comparison).at("ranked").front();
  EXPECT_GT(row.at("data_bytes").get<double>(), 1.2e12);
  EXPECT_EQ(row.at("published_fid"), "6.34 MJHQ");
}

PlanOptions on_pictures(const std::string& gpu, const std::string& folder, int64_t threads,
                        int64_t ranks = 1) {
  PlanOptions options = test::plan_options(
      gpu, ranks, settings("model=DiT-S/8 depth=1 autoencoder=pixels image-size=32 global-batch=8"));
  options.train.data.path = folder;
  options.train.data.loader_threads = threads;
  return options;
}

void write(const std::string& path, const std::vector<std::byte>& bytes) {
  test::write_bytes(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

void write_small_jpeg(const std::string& path) {
  const Image picture{64, 64, std::vector<uint8_t>(3 * 64 * 64, 90)};
  write(path, codecs::encode_jpeg(picture, 90));
}

TEST(DataOutlook, PicturesAreDecodedAtTheProfilesRate) {
  const test::TempFolder folder;
  const Image picture{300, 400, std::vector<uint8_t>(3 * 300 * 400, 90)};
  const std::vector<std::byte> file = codecs::encode_jpeg(picture, 90);
  for (const char* name : {"/a.jpg", "/b.jpg", "/c.jpg"}) write(folder.path().string() + name, file);
  write(folder / "d.webp", codecs::encode_webp(picture, 90));

  const PlanOptions options = on_pictures("H100", folder.path().string(), 1);
  const Plan plan = make_plan(options);
  EXPECT_EQ(plan.samples.num_samples, 4);
  EXPECT_EQ(plan.samples.formats, (std::map<std::string, double>{{"JPEG", 0.75}, {"WebP", 0.25}}));
  EXPECT_GT(plan.samples.picture_bytes, 3 * static_cast<int64_t>(file.size()));
  EXPECT_EQ(plan.samples.store_bytes(), 0);
  const DecodingRates& rates = plan.machine.decoding;
  // Halved as long as the short side is twice the wanted one: 300, 150, 75.
  const double halve_s =
      rates.halve.seconds(300 * 400) + rates.halve.seconds(150 * 200) + rates.halve.seconds(75 * 100);
  const double decode_s = 0.75 * rates.formats.at(PictureFormat::kJpeg).seconds(300 * 400) +
                          0.25 * rates.formats.at(PictureFormat::kWebp).seconds(300 * 400) + halve_s +
                          rates.crop.seconds(37 * 37);
  EXPECT_NEAR(plan.samples.decode_s, decode_s, 1e-9);
  EXPECT_NEAR(plan.data_rate.loader_images_per_s, 1 / decode_s, 0.05 / decode_s) << "draws take little";
  // One block on an H100 takes more pictures than a thread decodes.
  EXPECT_GT(plan.data_rate.slowdown(), 2);
  EXPECT_THAT(to_text(plan), has_all("its 1 loader thread delivers", "TOO SLOW for the steps",
                                     "JPEG 75 %, WebP 25 %, 400 x 300 px"));
  EXPECT_THAT(plan.advice, testing::Contains(HasSubstr("the loader decodes")));
  EXPECT_GT(to_json(plan).at("predicted").at("phase_s").at("data"), plan.step_s);

  const Plan enough = make_plan(on_pictures("H100", folder.path().string(), 1024));
  EXPECT_DOUBLE_EQ(enough.data_rate.slowdown(), 1);
  EXPECT_THAT(to_text(enough), HasSubstr("enough for the steps"));
  EXPECT_THAT(enough.advice, Not(testing::Contains(HasSubstr("the loader decodes"))));
}

TEST(DataOutlook, LargerPicturesAndBucketsTakeLonger) {
  const DecodingRates rates = builtin_decoding();
  const ImageHeader photograph{.height = 300, .width = 400};
  const double decode_s = rates.formats.at(PictureFormat::kJpeg).seconds(300 * 400);
  EXPECT_DOUBLE_EQ(rates.seconds(photograph, 200) - decode_s, rates.crop.seconds(300 * 300));
  EXPECT_DOUBLE_EQ(rates.seconds(photograph, 500) - decode_s, rates.crop.seconds(500 * 500)) << "enlarged";
  EXPECT_DOUBLE_EQ(rates.seconds(photograph, 0) - decode_s, rates.crop.seconds(300 * 400)) << "buckets";
}

TEST(DataOutlook, AllRanksOfACpuAreOnOneNode) {
  const test::TempFolder folder;
  for (const char* name : {"a.jpg", "b.jpg"}) write_small_jpeg(folder / name);
  const Plan alone = make_plan(on_pictures("cpu", folder.path().string(), 2)),
             four = make_plan(on_pictures("cpu", folder.path().string(), 2, 4));
  EXPECT_DOUBLE_EQ(four.data_rate.images_per_s, four.images_per_s);
  EXPECT_DOUBLE_EQ(four.data_rate.loader_images_per_s, 4 * alone.data_rate.loader_images_per_s);
  EXPECT_THAT(rate_text(four), HasSubstr("its 8 loader threads deliver"));
  EXPECT_EQ(four.scaling.back().gpus, 4);
}

TEST(DataOutlook, ASearchReadsTheDataOnce) {
  SearchOptions search;
  SearchTraces traces;
  std::optional<DataOutlook> outlook;
  {
    const test::TempFolder folder;
    write_small_jpeg(folder / "a.jpg");
    search.plan = on_pictures("A100-80G", folder.path().string(), 1);
    outlook = read_data_outlook(search.plan);
  }
  search.fixed = {"compute-dtype", "zero-stage", "offload-optimizer"};
  const MachineProfile machine = planned_machine(search.plan);
  Candidates candidates(search, machine, *outlook, traces);
  const Plan* plan = candidates.best(kFastest, {});
  ASSERT_TRUE(plan);
  EXPECT_GT(candidates.all().size(), 1);
  EXPECT_EQ(plan->samples.num_samples, 1);
  EXPECT_EQ(plan->samples.formats.begin()->first, "JPEG");
}

TEST(DataOutlook, AValidationIsOfNoMoreThanItsImages) {
  const test::TempFolder data, held_out;
  for (int i = 0; i < 12; ++i) write_small_jpeg(data / (std::to_string(i) + ".jpg"));
  for (int i = 0; i < 3; ++i) write_small_jpeg(held_out / (std::to_string(i) + ".jpg"));
  PlanOptions options = on_pictures("A100-80G", data.path().string(), 1);
  TrainOptions& train = options.train;
  train.global_batch = 512;
  const auto planned = [&](const std::string& validation_data, int64_t images) {
    train.validation.data = validation_data;
    train.validation.images = images;
    PhasePlan validation;
    for (const PhasePlan& phase : make_plan(options).phases)
      if (phase.name == "validation") validation = phase;
    return validation;
  };
  const std::string three = held_out.path().string();
  const PhasePlan counted = planned(three, 0), told = planned(three, 3), unknown = planned("not there", 0);
  EXPECT_EQ(counted.live_bytes, told.live_bytes);
  EXPECT_EQ(counted.bytes.host, told.bytes.host);
  EXPECT_LT(counted.live_bytes, unknown.live_bytes);
  EXPECT_LT(counted.bytes.host, unknown.bytes.host);

  train.validation = {.data = three};
  train.data.buckets = "32x32,16x64";
  train.data.bucket_min = 4;  // of the training: validation takes its buckets
  EXPECT_EQ(validation_samples(train), 3);
  train.validation = {.data = "", .share = 0.5};
  EXPECT_EQ(validation_samples(train) + samples_of(train), 12);
}

TEST(DataOutlook, WithoutPicturesTheirSizeIsAssumedAndSaid) {
  const Plan plan = make_plan(test::plan_options(
      "A100-80G", 8,
      settings("model=DiT-B/4 depth=1 compute-dtype=bf16 autoencoder=sd-vae-ft-mse micro-batch=32")));
  EXPECT_TRUE(plan.samples.reads_pictures);
  EXPECT_THAT(samples_text(plan.samples), has_all("1281167 pictures", "JPEG, 500 x 400 px; assumed"));
  EXPECT_THAT(rate_text(plan), HasSubstr("its 8 loader threads deliver"));
  // Once through the encoder or through the decoding threads, whichever is slower.
  const double encoding = kImageNet * plan.encoding_s / 256, decoding = kImageNet * plan.samples.decode_s / 8;
  EXPECT_NEAR(plan.extraction_days * kSecondsPerDay, std::max(encoding, decoding), 1);
  EXPECT_THAT(plan.advice, testing::Contains(HasSubstr("for 1281167 pictures)")));
}

TEST(DataOutlook, TheDiskIsTheOneThatWasMeasuredThere) {
  MachineProfile machine = find_profile("A100-80G");
  const test::TempFolder folder;
  const std::string path = folder.path().string();
  machine.disks = {
      {.folder = "/proc", .file_system = "", .read_bytes_per_s = 1, .write_bytes_per_s = 1},
      {.folder = path, .file_system = "ext4", .read_bytes_per_s = 3e8, .write_bytes_per_s = 1e8}};
  const double assumed = machine.disk_bytes_per_s;
  const MachineProfile here = with_disks_of(machine, folder / "store", folder / "nvme");
  EXPECT_EQ(here.disk_bytes_per_s, 3e8);
  EXPECT_DOUBLE_EQ(offload_disk(here), 1.5e8) << "as much is written as is read";
  EXPECT_EQ(with_disks_of(machine, "", "").disk_bytes_per_s, assumed);
  EXPECT_EQ(offload_disk(with_disks_of(machine, "", "")), assumed);
  const nlohmann::json json = to_json(here);
  EXPECT_EQ(to_json(profile_from_json(json)), json);
}

// A profile with a disk, for data on it that are planned as if behind a network.
Plan on_network(const std::string& data, const std::vector<DiskSpeed>& disks) {
  PlanOptions options = on_pictures("A100-80G", data, 1);
  MachineProfile machine = planned_machine(options);
  machine.disks = disks;
  DataOutlook outlook = read_data_outlook(options);
  outlook.samples.file_system = "NFS";
  outlook.samples.is_network = true;
  return plan_data(options, machine, outlook);
}

TEST(DataOutlook, ANetworkIsWarnedOfUntilItIsMeasured) {
  const test::TempFolder folder;
  write_small_jpeg(folder / "a.jpg");
  const std::string data = folder.path().string();
  const auto warning = testing::Contains(HasSubstr("a network file system"));
  EXPECT_THAT(on_network(data, {}).advice, warning);
  EXPECT_THAT(on_network(data, {{.folder = "/proc", .file_system = "", .read_bytes_per_s = 1}}).advice,
              warning);
  EXPECT_THAT(on_network(data, {{.folder = data, .file_system = "NFS"}}).advice, warning)
      << "nothing was measured";
  EXPECT_THAT(on_network(data, {{.folder = data, .file_system = "NFS", .read_bytes_per_s = 1e8}}).advice,
              Not(warning));
}

// Returns the bytes per second of the fastest of some copies within a processor's cache.
double cached_copy_bytes_per_s() {
  std::vector<char> from(1 << 18, 'x'), to(from.size());
  double least = 1;
  for (int i = 0; i < 1000; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    std::memcpy(to.data(), from.data(), from.size());  // vectorised in any build of the tests
    least = std::min(least, elapsed_since(begin));
    from[static_cast<size_t>(i)] = to[static_cast<size_t>(i) + 1];
  }
  return static_cast<double>(from.size()) / least;
}

// A speed is at least what the whole call took, and no disk is faster than a cache.
TEST(DataOutlook, ADiskIsMeasuredByWhatLiesOnIt) {
  const test::TempFolder folder;
  constexpr double kBytes = 40 << 20;
  test::write_bytes(folder / "shard", std::string(static_cast<size_t>(kBytes), 'x'));
  for (const bool may_write : {false, true}) {
    const auto begin = std::chrono::steady_clock::now();
    const DiskSpeed disk = measure_disk(folder / "shard", may_write);
    const double took = elapsed_since(begin), copying = cached_copy_bytes_per_s();
    EXPECT_EQ(disk.folder, folder.path().string());
    EXPECT_GT(disk.read_bytes_per_s, kBytes / took);
    EXPECT_LT(disk.read_bytes_per_s, copying);
    if (may_write) {
      EXPECT_GT(disk.write_bytes_per_s, (32 << 20) / took);
      EXPECT_LT(disk.write_bytes_per_s, copying);
    } else {
      EXPECT_EQ(disk.write_bytes_per_s, 0);
    }
    EXPECT_EQ(folder.num_files(), 1) << "nothing is left behind";
  }
}

TEST(DataOutlook, OfAnEmptyFolderOnlyWritingTells) {
  const test::TempFolder folder;
  EXPECT_EQ(measure_disk(folder.path().string(), /*may_write=*/false).read_bytes_per_s, 0);
  const DiskSpeed disk = measure_disk(folder / "not-there-yet", /*may_write=*/true);
  EXPECT_EQ(disk.folder, folder.path().string());
  EXPECT_GT(disk.read_bytes_per_s, 0);
  EXPECT_GT(disk.write_bytes_per_s, 0);
  EXPECT_EQ(folder.num_files(), 0);
}

}  // namespace
}  // namespace kiln
