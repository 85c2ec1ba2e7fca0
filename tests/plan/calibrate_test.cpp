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

  store_profile(calibrate(at::kCPU, /*seconds=*/3));
  const MachineProfile profile = find_profile("cpu");
  EXPECT_TRUE(profile.measured);
  EXPECT_THAT(profile.source, StartsWith("measured on " + profile.machine));
  EXPECT_GT(profile.disk_bytes_per_s, 1e6);
  EXPECT_GT(profile.peak_flops.at(at::kFloat), 1e9);
  EXPECT_LT(profile.peak_flops.at(at::kFloat), 1e14);
  EXPECT_FALSE(profile.rates.empty());
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
