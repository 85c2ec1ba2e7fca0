// What a plan says of --untried-gpu.
#include <gtest/gtest.h>

#include "plan/memory/device_memory.h"
#include "plan/plan_settings.h"

namespace kiln {
namespace {

Plan plan_of_b2(const nlohmann::json& more) {
  nlohmann::json settings = {{"model", "DiT-B/2"}, {"compute-dtype", "bf16"}, {"global-batch", 64}};
  settings.update(more);
  return make_plan(test::plan_options("H200", 1, settings));
}

double seconds_in(const Plan& plan, StepPhase phase) { return plan.phase_s[static_cast<size_t>(phase)]; }

// Products hide the update but for its first unit, and pay for it; timed products are faster.
TEST(UntriedPlan, HidesTheUpdateAndCountsTimedProducts) {
  const Plan plain = plan_of_b2(nlohmann::json::object()), untried = plan_of_b2({{"untried-gpu", "all"}});
  const double before = seconds_in(plain, StepPhase::kOptimizer),
               after = seconds_in(untried, StepPhase::kOptimizer);
  EXPECT_GT(after, 0.45 * before);
  EXPECT_LT(after, 0.65 * before);
  EXPECT_LT(seconds_in(untried, StepPhase::kForward), seconds_in(plain, StepPhase::kForward));
  EXPECT_LT(untried.step_s, plain.step_s);
}

// Each way is faster by itself, and no faster than all.
TEST(UntriedPlan, EachWayIsPricedByItself) {
  const double plain_s = plan_of_b2(nlohmann::json::object()).step_s,
               all_s = plan_of_b2({{"untried-gpu", "all"}}).step_s;
  for (const std::string& way : choice_names<Untried>()) {
    const double step_s = plan_of_b2({{"untried-gpu", way}}).step_s;
    EXPECT_LT(step_s, plain_s) << way;
    EXPECT_GT(step_s, all_s) << way;
  }
}

// Flash attention leaves the gradients apart.
TEST(UntriedPlan, PacksGradientsWhereTheKernelsDo) {
  const auto gains = [](const std::string& gpu, nlohmann::json settings) {
    settings.update({{"model", "DiT-B/2"}, {"global-batch", 64}});
    PlanOptions options = test::plan_options(gpu, 1, settings);
    const double apart_s = make_plan(options).step_s;
    options.train.compute.untried_gpu = UntriedGpu::parse("packed-gradients");
    return make_plan(options).step_s < apart_s;
  };
  const nlohmann::json bf16 = {{"compute-dtype", "bf16"}};
  EXPECT_TRUE(gains("H100", bf16));
  EXPECT_FALSE(gains("A100-80G", bf16));
  EXPECT_TRUE(gains("A100-80G", {{"compute-dtype", "f32"}}));
  EXPECT_TRUE(gains("T4", {{"compute-dtype", "fp16"}}));
  EXPECT_FALSE(gains("H100", {{"compute-dtype", "bf16"}, {"deterministic", true}}));
}

TEST(UntriedPlan, HidesNothingWhereTheUpdateStays) {
  const nlohmann::json graph = {{"cuda-graph", true}}, offload = {{"offload-optimizer", "cpu"}};
  for (const nlohmann::json& more : {graph, offload}) {
    nlohmann::json untried = more;
    untried["untried-gpu"] = "all";
    EXPECT_EQ(seconds_in(plan_of_b2(untried), StepPhase::kOptimizer),
              seconds_in(plan_of_b2(more), StepPhase::kOptimizer))
        << more;
  }
}

// A small forward cannot hide the update of a large model.
TEST(UntriedPlan, AShortForwardHidesLess) {
  const auto share = [](int64_t batch) {
    const nlohmann::json size = {{"global-batch", batch}};
    nlohmann::json untried = size;
    untried["untried-gpu"] = "all";
    return seconds_in(plan_of_b2(untried), StepPhase::kOptimizer) /
           seconds_in(plan_of_b2(size), StepPhase::kOptimizer);
  };
  EXPECT_GT(share(1), share(64));
  EXPECT_LE(share(1), 1);
}

TEST(UntriedPlan, BlocksOfTheUpdateAreOfItsStream) {
  Span forward{.phase = StepPhase::kForward}, update{.phase = StepPhase::kOptimizer};
  forward.events = {{.id = 1, .bytes = 20 << 20}, {.id = 1, .bytes = -(20 << 20)}};
  update.events = {{.id = 2, .bytes = 20 << 20}, {.id = 2, .bytes = -(20 << 20)}};
  for (const bool beside : {false, true}) {
    DeviceTimeline timeline(/*caching=*/true, /*capacity_bytes=*/0);
    EXPECT_EQ(timeline.play({forward, update}, beside).reserved_bytes, (beside ? 40 : 20) << 20);
    EXPECT_EQ(timeline.play({forward, update}, beside).live_bytes, 20 << 20);
  }
}

}  // namespace
}  // namespace kiln
