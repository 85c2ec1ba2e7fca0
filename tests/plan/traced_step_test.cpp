#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <map>
#include <tuple>

#include "core/aten.h"
#include "plan/described_ops.h"
#include "plan/price/step_timing.h"
#include "plan/ranks/step_time.h"
#include "plan/run/make_plan.h"
#include "plan/search/comparison.h"
#include "plan/trace/trace.h"
#include "run/option_values.h"

namespace kiln {
namespace {

TrainOptions small_options(const std::string& dtype, const std::string& recompute) {
  TrainOptions options;
  options.model.name = "DiT-S/8";
  options.model.depth = 2;
  options.global_batch = 4;
  options.micro_batch = 3;
  set_option(options, "compute-dtype", dtype);
  options.memory.recompute = SegmentSet::parse(recompute);
  return options;
}

class TracedStep : public ::testing::TestWithParam<const char*> {
 protected:
  static void SetUpTestSuite() { at::set_num_threads(1); }  // small tensors: threads would only wait
};
INSTANTIATE_TEST_SUITE_P(Dtypes, TracedStep, ::testing::Values("f32", "bf16", "fp16"));

// Every operation, in order: name, dtype, work, phase and segment.
TEST_P(TracedStep, RunsTheSameOnMetaAndOnTheCpu) {
  for (const char* recompute : {"none", "0"}) {
    const TrainOptions options = small_options(GetParam(), recompute);
    SCOPED_TRACE(::testing::Message() << "recompute " << recompute);
    test::expect_same_operations(
        test::described(trace_step(options, synthetic_shape(options), DryRunDevice::kCpu).spans),
        test::described(time_steps(options, at::kCPU, {.plain = 1, .watched = 1, .warm_up = 0}).spans));
  }
}

// Nothing that multiplies is missed and nothing else is counted: at sizes that the model is not made for,
// with captions of mean length. Backward is twice the forward, and fused attention runs 2.5 times its
// forward.
TEST(TracedStep, FlopsAreThoseOfTheModel) {
  struct Counted {
    const char* model;
    int64_t depth, image_size;
    double tolerance;
  };
  for (const Counted& counted : {Counted{"DiT-S/2", 12, 256, 0.01},
                                 {"PixArt-Sigma-XL/2-1024", 2, 256, 0.02},
                                 {"Sana-600M", 2, 512, 0.02},
                                 {"sd15", 0, 256, 0.02}}) {
    SCOPED_TRACE(counted.model);
    TrainOptions options;
    options.model.name = counted.model;
    options.model.depth = counted.depth;
    options.data.image_size = counted.image_size;
    options.global_batch = 2;
    options = as_published(options, {"image-size"});
    const DataShape data = synthetic_shape(options);
    const StepTrace trace = trace_step(options, usual_shape(data).value_or(data), DryRunDevice::kCpu);
    double flops = 0, attention = 0;
    for (const OpRecord& op : ops_of(trace.spans)) {
      flops += op.flops;
      if (op.op_class == OpClass::kAttention) attention += op.flops;
    }
    const double beyond_twice = attention * 0.5 / 3.5;
    EXPECT_NEAR((flops - beyond_twice) / (2 * trace.flops_per_image), 1, counted.tolerance);
  }
}

TEST(TracedStep, RecomputeAddsTheForwardOfItsBlocks) {
  const auto flops = [](const std::string& recompute) {
    const TrainOptions options = small_options("bf16", recompute);
    double all = 0, again = 0;
    for (const Span& span : trace_step(options, synthetic_shape(options), DryRunDevice::kCuda).spans)
      for (const OpRecord& op : span.ops) {
        all += op.flops;
        if (span.phase == StepPhase::kRecompute) again += op.flops;
      }
    return std::pair(all, again);
  };
  const auto [none, none_again] = flops("none");
  const auto [all, all_again] = flops("all");
  EXPECT_EQ(none_again, 0);
  EXPECT_GT(all_again, 0.3 * none);
  EXPECT_DOUBLE_EQ(all, none + all_again);
}

// One of many equal micro-steps stands for all of them.
TEST(TracedStep, OfManyMicroStepsIsThatOfEveryOne) {
  for (DryRunDevice device : {DryRunDevice::kCpu, DryRunDevice::kCuda})
    for (const auto& [global_batch, world_size, stage] :
         std::vector<std::tuple<int64_t, int64_t, int64_t>>{{14, 1, 0}, {17, 1, 0}, {34, 2, 2}, {29, 2, 3}}) {
      TrainOptions options = small_options("bf16", "0");
      options.global_batch = global_batch;
      options.micro_batch = 2;
      options.zero.stage = stage;
      const DataShape data = synthetic_shape(options);
      const StepTrace composed = trace_step(options, data, device, world_size),
                      whole = trace_every_micro_step(options, data, device, world_size);
      EXPECT_EQ(composed.memory.peak_bytes, whole.memory.peak_bytes) << global_batch;
      EXPECT_EQ(composed.memory.peak_phase, whole.memory.peak_phase);
      EXPECT_EQ(composed.memory.persistent, whole.memory.persistent);
      EXPECT_LT(composed.spans.size(), whole.spans.size());
      EXPECT_EQ(num_micro_steps(composed), num_micro_steps(whole));
      std::map<std::string, double> counts;
      double flops = 0;
      const auto add = [&](const StepTrace& trace, double sign) {
        for (const Span& span : trace.spans)
          for (const OpRecord& op : span.ops) {
            counts[fmt::format("{} {} of {}", op.name, name_of(span.phase), span.segment)] +=
                sign * static_cast<double>(span.times);
            flops += sign * static_cast<double>(span.times) * op.flops;
          }
      };
      add(composed, 1);
      add(whole, -1);
      for (const auto& [what, difference] : counts) EXPECT_EQ(difference, 0) << what;
      EXPECT_EQ(flops, 0);
      const MachineProfile machine = find_profile("A100-80G");
      const Sharding sharding{.gpus = world_size, .zero_stage = stage};
      if (device == DryRunDevice::kCpu) continue;
      EXPECT_NEAR(
          time_step(composed, machine, sharding).seconds / time_step(whole, machine, sharding).seconds, 1,
          0.01);
    }
}

TEST(TracedStep, LargestModelInAFractionOfASecond) {
  TrainOptions options;
  options.model.name = "DiT-XL/2";
  options.compute.dtype = at::kBFloat16;
  const std::clock_t begin = std::clock();  // of this process: other programs do not count
  const StepTrace trace = trace_step(options, synthetic_shape(options), DryRunDevice::kCuda);
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  RecordProperty("seconds", std::to_string(seconds));
  EXPECT_GT(ops_of(trace.spans).size(), 1000u);
  EXPECT_LT(seconds, 0.6) << "0.1 s on an idle machine";
}

}  // namespace
}  // namespace kiln
