// A calibration of a few seconds: what it keeps, and what plans then say.
#include "plan/price/calibrate.h"

#include <cstdlib>

#include "models/registry.h"
#include "plan/price/step_timing.h"
#include "plan/report/report.h"
#include "plan/run/make_plan.h"
#include "plan/trace/trace.h"
#include "test_files.h"

namespace kiln {
namespace {

// Profiles are kept in a folder of the test's.
class ProfilesFolder {
 public:
  ProfilesFolder() { ::setenv("KILN_PROFILES", folder_.path().c_str(), 1); }
  ~ProfilesFolder() { ::unsetenv("KILN_PROFILES"); }

 private:
  test::TempFolder folder_;
};

// Enough data to tell how fast they are read, on a disk that profiles are seldom on.
class FileInMemory {
 public:
  FileInMemory() {
    folder_ = ::mkdtemp(folder_.data());
    test::write_bytes(folder_ + "/data", std::string(64 << 20, 'x'));
  }
  ~FileInMemory() { std::filesystem::remove_all(folder_); }
  const std::string& folder() const { return folder_; }

 private:
  std::string folder_ = "/dev/shm/kiln-test-XXXXXX";
};

TEST(Calibrate, PlansAreMadeFromWhatWasMeasured) {
  const ProfilesFolder folder;
  PlanOptions options;
  options.train.model.name = "DiT-S/8";
  options.train.model.depth = 4;
  options.train.global_batch = 8;
  EXPECT_THAT(to_text(make_plan(options)), HasSubstr("estimate"));

  const FileInMemory data;
  store_profile(calibrate(at::kCPU, /*seconds=*/3, {.data = data.folder(), .offloaded = ""}));
  const MachineProfile profile = find_profile("cpu");
  EXPECT_TRUE(profile.measured);
  EXPECT_THAT(profile.source, StartsWith("measured on " + profile.machine));
  // Of the same machine at another moment; the larger product of the two is the faster one.
  const double estimated_flops = estimate_cpu().peak_flops.at(at::kFloat);
  EXPECT_GT(profile.peak_flops.at(at::kFloat), estimated_flops / 4);
  EXPECT_LT(profile.peak_flops.at(at::kFloat), estimated_flops * 4);
  EXPECT_GT(profile.rank_hop_s, 1e-6);
  EXPECT_LT(profile.rank_hop_s, 0.1);
  EXPECT_GT(profile.peer_bytes_per_s, 1e6);
  EXPECT_LT(profile.peer_bytes_per_s, profile.memory_bytes_per_s) << "each byte is copied more than once";
  EXPECT_FALSE(profile.rates.empty());
  const DiskSpeed *of_data = disk_of(profile.disks, data.folder()),
                  *of_profiles = disk_of(profile.disks, profiles_folder());
  ASSERT_TRUE(of_data);
  ASSERT_TRUE(of_profiles);
  EXPECT_EQ(of_data->folder, data.folder());
  EXPECT_EQ(of_data->file_system, "tmpfs");
  EXPECT_EQ(of_data->write_bytes_per_s, 0) << "data are only read";
  EXPECT_GT(of_profiles->write_bytes_per_s, 0);
  EXPECT_EQ(profile.disk_bytes_per_s, of_data->read_bytes_per_s);
  EXPECT_TRUE(profile.decoding.is_measured);
  const DecodingRates known = builtin_decoding();
  for (const auto& [format, name] : Choices<PictureFormat>::kAll) {
    const ImageHeader picture{.height = 1000, .width = 1000, .format = format};
    for (const int64_t side : {400, 667}) {
      const double seconds = profile.decoding.seconds(picture, side),
                   of_a_server = known.seconds(picture, side);
      EXPECT_GT(seconds, of_a_server / 8) << name;
      EXPECT_LT(seconds, of_a_server * 8) << name;
    }
  }
  EXPECT_GT(profile.decoding.crop.seconds(1e6), profile.decoding.halve.seconds(1e6)) << "it takes more taps";
  for (const auto& [operation, points] : profile.rates)
    for (const RatePoint& point : points) {
      EXPECT_GT(point.seconds, 0) << operation;
      EXPECT_LT(point.seconds, 10) << operation;
    }

  const Plan plan = make_plan(options);
  EXPECT_THAT(to_text(plan), HasSubstr(profile.source));
  EXPECT_EQ(to_json(plan).at("machine").at("measured"), true);
  // On a machine that may be busy now and was not then, or the other way round.
  const double seconds = time_steps(options.train, at::kCPU, {.plain = 3}).least_seconds;
  EXPECT_GT(plan.step_s, seconds / 30);
  EXPECT_LT(plan.step_s, seconds * 30);
}

TEST(Calibrate, EveryFamilysWorkloadsCanBeTrained) {
  for (const Family& family : denoiser_families())
    for (const CalibrationWorkload& workload : family.calibration) {
      const TrainOptions options = calibration_step(family, workload, at::kBFloat16, at::kCPU);
      EXPECT_FALSE(trace_step(options, synthetic_shape(options), DryRunDevice::kCpu).spans.empty())
          << family.name;
    }
}

}  // namespace
}  // namespace kiln
