// What samples take on a disk, and whether they come fast enough.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/units.h"
#include "data/images/image_codecs.h"
#include "plan/report/report.h"
#include "plan/run/data_text.h"
#include "plan/search/comparison.h"
#include "plan_settings.h"
#include "test_files.h"

namespace kiln {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kImageNet = 1'281'167;

PlanOptions pixart(const nlohmann::json& more = {}) {
  nlohmann::json settings = {{"model", "PixArt-Sigma-XL/2-512"},
                             {"image-size", 512},
                             {"depth", 1},
                             {"compute-dtype", "bf16"},
                             {"micro-batch", 16}};
  if (!more.is_null()) settings.update(more);
  return test::plan_options("A100-80G", 1, settings);
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
  const Plan plan = make_plan(test::plan_options("A100-80G", 1,
                                                 {{"model", "sd15"},
                                                  {"image-size", 512},
                                                  {"objective", "epsilon"},
                                                  {"compute-dtype", "bf16"},
                                                  {"global-batch", 4}}));
  EXPECT_DOUBLE_EQ(plan.samples.caption_bytes, 77 * 768 * 2);
  EXPECT_EQ(plan.samples.assumed, "");
}

TEST(DataOutlook, SearchAndStagesSayIt) {
  ComparisonOptions options{
      .search = {.plan = pixart()}, .models = {"PixArt-Sigma-XL/2-512"}, .gpus = {"A100-80G"}};
  options.search.fixed = {"micro-batch", "compute-dtype", "recompute", "zero-stage", "offload-optimizer"};
  const Comparison comparison = compare_runs(options);
  EXPECT_THAT(to_text(comparison), HasSubstr("data GiB"));
  EXPECT_THAT(to_text(comparison), HasSubstr("6.34 MJHQ"));
  const nlohmann::json row = to_json(comparison).at("ranked").front();
  EXPECT_GT(row.at("data_bytes").get<double>(), 1.2e12);
  EXPECT_EQ(row.at("published_fid"), "6.34 MJHQ");
}

PlanOptions on_pictures(const std::string& gpu, const std::string& folder, int64_t threads) {
  return test::plan_options(gpu, 1,
                            {{"model", "DiT-S/8"},
                             {"depth", 1},
                             {"data", folder},
                             {"autoencoder", "pixels"},
                             {"image-size", 32},
                             {"global-batch", 8},
                             {"loader-threads", threads}});
}

void write(const std::string& path, const std::vector<std::byte>& bytes) {
  test::write_bytes(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
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
  const double decode_s = 0.75 * rates.seconds(PictureFormat::kJpeg, 300 * 400) +
                          0.25 * rates.seconds(PictureFormat::kWebp, 300 * 400);
  EXPECT_NEAR(plan.samples.decode_s, decode_s, 1e-9);
  EXPECT_NEAR(plan.data_rate.loader_images_per_s, 1 / decode_s, 0.05 / decode_s) << "draws take little";
  // One block on an H100 takes more pictures than a thread decodes.
  EXPECT_GT(plan.data_rate.slowdown(), 2);
  EXPECT_THAT(to_text(plan), HasSubstr("its 1 loader thread delivers"));
  EXPECT_THAT(to_text(plan), HasSubstr("TOO SLOW for the steps"));
  EXPECT_THAT(to_text(plan), HasSubstr("JPEG 75 %, WebP 25 %, 400 x 300 px"));
  EXPECT_THAT(plan.advice, testing::Contains(HasSubstr("the loader decodes")));
  EXPECT_GT(to_json(plan).at("predicted").at("phase_s").at("data"), plan.step_s);

  const Plan enough = make_plan(on_pictures("H100", folder.path().string(), 1024));
  EXPECT_DOUBLE_EQ(enough.data_rate.slowdown(), 1);
  EXPECT_THAT(to_text(enough), HasSubstr("enough for the steps"));
  EXPECT_THAT(enough.advice, Not(testing::Contains(HasSubstr("the loader decodes"))));
}

TEST(DataOutlook, WithoutPicturesTheirSizeIsAssumedAndSaid) {
  const Plan plan = make_plan(test::plan_options("A100-80G", 8,
                                                 {{"model", "DiT-B/4"},
                                                  {"depth", 1},
                                                  {"compute-dtype", "bf16"},
                                                  {"autoencoder", "sd-vae-ft-mse"},
                                                  {"micro-batch", 32}}));
  EXPECT_TRUE(plan.samples.reads_pictures);
  EXPECT_THAT(samples_text(plan.samples), HasSubstr("1281167 pictures"));
  EXPECT_THAT(samples_text(plan.samples), HasSubstr("JPEG, 500 x 400 px; assumed"));
  EXPECT_THAT(rate_text(plan), HasSubstr("its 8 loader threads deliver"));
  // Once through the encoder or through the decoding threads, whichever is slower.
  const double encoding = kImageNet * plan.encoding_s / 256, decoding = kImageNet * plan.samples.decode_s / 8;
  EXPECT_NEAR(plan.extraction_days * kSecondsPerDay, std::max(encoding, decoding), 1);
  EXPECT_THAT(plan.advice, testing::Contains(HasSubstr("for 1281167 pictures)")));
}

TEST(DataOutlook, TheDiskIsTheOneThatWasMeasuredThere) {
  MachineProfile machine = find_profile("A100-80G");
  const test::TempFolder folder;
  machine.disks = {{.folder = "/proc", .file_system = "", .read_bytes_per_s = 1, .write_bytes_per_s = 1},
                   {.folder = folder.path().string(),
                    .file_system = "ext4",
                    .read_bytes_per_s = 3e8,
                    .write_bytes_per_s = 1e8}};
  const double assumed = machine.disk_bytes_per_s;
  const MachineProfile here = with_disks_of(machine, folder / "store", folder / "nvme");
  EXPECT_EQ(here.disk_bytes_per_s, 3e8);
  EXPECT_DOUBLE_EQ(offload_disk(here), 1.5e8) << "as much is written as is read";
  EXPECT_EQ(with_disks_of(machine, "", "").disk_bytes_per_s, assumed);
  EXPECT_EQ(offload_disk(with_disks_of(machine, "", "")), assumed);
  const nlohmann::json json = to_json(here);
  EXPECT_EQ(to_json(profile_from_json(json)), json);
}

TEST(DataOutlook, ADiskIsMeasuredByWhatLiesOnIt) {
  const test::TempFolder folder;
  test::write_bytes(folder / "shard", std::string(40 << 20, 'x'));
  const DiskSpeed disk = measure_disk(folder / "shard");
  EXPECT_EQ(disk.folder, folder.path().string());
  EXPECT_GT(disk.read_bytes_per_s, 1e6);
  EXPECT_GT(disk.write_bytes_per_s, 1e6);
  EXPECT_EQ(folder.num_files(), 1) << "nothing is left behind";
}

}  // namespace
}  // namespace kiln
