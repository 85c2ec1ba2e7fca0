// A calibration of a few seconds: what it keeps, and what plans then say.
#include "plan/price/calibrate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "models/registry.h"
#include "plan/price/step_timing.h"
#include "plan/report/report.h"
#include "plan/run/make_plan.h"
#include "plan/trace/trace.h"
#include "test_files.h"

namespace kiln {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// Profiles are kept in a folder of the test's.
class ProfilesFolder {
 public:
  ProfilesFolder() { ::setenv("KILN_PROFILES", folder_.path().c_str(), 1); }
  ~ProfilesFolder() { ::unsetenv("KILN_PROFILES"); }

 private:
  test::TempFolder folder_;
};

TEST(Calibrate, PlansAreMadeFromWhatWasMeasured) {
  const ProfilesFolder folder;
  PlanOptions options;
  options.train.model.name = "DiT-S/8";
  options.train.model.depth = 4;
  options.train.global_batch = 8;
  EXPECT_THAT(to_text(make_plan(options)), HasSubstr("estimate"));

  // tmpfs is never the file system of the profiles, and is fast.
  store_profile(calibrate(at::kCPU, /*seconds=*/3, {"/dev/shm"}));
  const MachineProfile profile = find_profile("cpu");
  EXPECT_TRUE(profile.measured);
  EXPECT_THAT(profile.source, StartsWith("measured on " + profile.machine));
  EXPECT_GT(profile.disk_bytes_per_s, 1e6);
  EXPECT_GT(profile.peak_flops.at(at::kFloat), 1e9);
  EXPECT_LT(profile.peak_flops.at(at::kFloat), 1e14);
  EXPECT_GT(profile.rank_hop_s, 1e-6);
  EXPECT_LT(profile.rank_hop_s, 0.1);
  EXPECT_GT(profile.peer_bytes_per_s, 1e6);
  EXPECT_LT(profile.peer_bytes_per_s, profile.memory_bytes_per_s) << "each byte is copied more than once";
  EXPECT_FALSE(profile.rates.empty());
  ASSERT_EQ(profile.disks.size(), 2);
  EXPECT_EQ(profile.disks.front().folder, "/dev/shm");
  EXPECT_EQ(profile.disks.front().file_system, "tmpfs");
  EXPECT_EQ(with_disks_of(profile, profiles_folder(), "/dev/shm").disk_bytes_per_s,
            profile.disks.back().read_bytes_per_s);
  EXPECT_GT(offload_disk(with_disks_of(profile, profiles_folder(), "/dev/shm")), 1e6);
  EXPECT_TRUE(profile.decoding.is_measured);
  for (const PictureFormat format : {PictureFormat::kJpeg, PictureFormat::kPng, PictureFormat::kWebp}) {
    const double milliseconds = 1e3 * profile.decoding.seconds(format, 1e6);
    EXPECT_GT(milliseconds, 1) << choice_name(format);
    EXPECT_LT(milliseconds, 1000) << choice_name(format);
  }
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
