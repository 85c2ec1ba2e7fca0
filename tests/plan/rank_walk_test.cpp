// The trace of one of several ranks that is composed of one rank's, against the trace itself.
#include "plan/rank_walk.h"

#include <gtest/gtest.h>

#include "plan/plan_settings.h"
#include "plan/planned_data.h"

namespace kiln {
namespace {

struct RankSetting {
  const char* dtype;
  int64_t micro_batch, zero_stage;
};

class ComposedRank : public ::testing::TestWithParam<RankSetting> {
 protected:
  static PlanOptions options() {
    return test::plan_options("A100-80G", 8,
                              {{"model", "DiT-S/4"},
                               {"depth", 3},
                               {"global-batch", 256},
                               {"compute-dtype", GetParam().dtype},
                               {"micro-batch", GetParam().micro_batch},
                               {"zero-stage", GetParam().zero_stage}});
  }
  static StepTrace of_rank(const PlanOptions& options) {
    return trace_step(options.train, planned_shape(options.train), DryRunDevice::kCuda, options.gpus);
  }
  static StepTrace alone(PlanOptions options) {
    TrainOptions train = test::rank_alone(options);
    train.zero_stage = 0;
    train.offload_optimizer = "none";
    return trace_step(train, planned_shape(train), DryRunDevice::kCuda);
  }
};

TEST_P(ComposedRank, HasTheSameBytes) {
  const StepMemory expected = of_rank(options()).memory;
  const StepMemory composed = trace_of_rank(alone(options()), sharding_of(options().train, options().gpus,
                                                                          planned_machine(options())))
                                  .memory;
  EXPECT_EQ(composed.persistent, expected.persistent);
  EXPECT_EQ(composed.peak_bytes, expected.peak_bytes);
  EXPECT_EQ(composed.peak_by_kind, expected.peak_by_kind);
  ASSERT_EQ(composed.marks.size(), expected.marks.size());
  for (size_t i = 0; i < expected.marks.size(); ++i) {
    const MemoryMark &mark = composed.marks[i], &wanted = expected.marks[i];
    ASSERT_EQ(std::tie(mark.phase, mark.segment), std::tie(wanted.phase, wanted.segment)) << i;
    if (mark.phase == StepPhase::kInput) continue;  // two in a row, which composing takes as one
    EXPECT_EQ(mark.peak_bytes, wanted.peak_bytes) << name_of(mark.phase) << " of " << mark.segment;
  }
}

TEST_P(ComposedRank, DoesTheSameInTheSameTime) {
  const StepTrace expected = of_rank(options());
  const Sharding sharding = sharding_of(options().train, options().gpus, planned_machine(options()));
  const StepTrace composed = trace_of_rank(alone(options()), sharding);
  ASSERT_EQ(composed.ops.size(), expected.ops.size());
  for (size_t i = 0; i < expected.ops.size(); ++i) {
    const OpRecord &op = composed.ops[i], &wanted = expected.ops[i];
    ASSERT_EQ(op.name, wanted.name) << i << " in " << name_of(op.phase) << " of " << op.segment;
    EXPECT_EQ(op.times, wanted.times) << i << " " << op.name;
    EXPECT_NEAR(op.bytes, wanted.bytes, 1e-9 * wanted.bytes) << i << " " << op.name;
    EXPECT_EQ(op.flops, wanted.flops) << i << " " << op.name;
  }
  ASSERT_EQ(composed.collectives.size(), expected.collectives.size());
  for (size_t i = 0; i < expected.collectives.size(); ++i) {
    const CollectiveEvent &event = composed.collectives[i], &wanted = expected.collectives[i];
    EXPECT_EQ(std::tie(event.before_op, event.number, event.begins, event.operation, event.bytes),
              std::tie(wanted.before_op, wanted.number, wanted.begins, wanted.operation, wanted.bytes))
        << i;
  }
  const MachineProfile machine = find_profile(options().gpu);
  const double wanted_s = time_step(expected, machine, sharding).seconds;
  EXPECT_NEAR(time_step(composed, machine, sharding).seconds, wanted_s, 1e-9 * wanted_s);
}

// Of other ranks at the same stage, too: what scaling is made of.
TEST_P(ComposedRank, TakesAsLongFromATraceOfOtherRanks) {
  PlanOptions others = options();
  others.gpus = 32;
  others.train.global_batch *= 4;
  const MachineProfile machine = planned_machine(others);
  const Sharding sharding = sharding_of(others.train, others.gpus, machine);
  const StepTime expected = time_step(of_rank(others), machine, sharding),
                 composed = time_step(of_rank(options()), machine, sharding);
  // Units that 32 ranks divide have an end to be zeroed that those of 8 may not have.
  EXPECT_NEAR(composed.seconds, expected.seconds, 5e-3 * expected.seconds);
  EXPECT_NEAR(composed.communication_s, expected.communication_s, 1e-6 * expected.communication_s);
}

TEST_P(ComposedRank, OffloadsTheSame) {
  for (const char* place : {"cpu", "nvme"}) {
    PlanOptions offloading = options();
    offloading.train.offload_optimizer = place;
    const Sharding sharding = sharding_of(offloading.train, offloading.gpus, planned_machine(offloading));
    const StepTrace expected = of_rank(offloading), composed = trace_of_rank(alone(offloading), sharding);
    EXPECT_EQ(composed.memory.persistent, expected.memory.persistent) << place;
    EXPECT_EQ(composed.offloaded.host, expected.offloaded.host) << place;
    EXPECT_EQ(composed.offloaded.disk, expected.offloaded.disk) << place;
    EXPECT_EQ(composed.memory.peak_bytes, expected.memory.peak_bytes) << place;
    const MachineProfile machine = find_profile(offloading.gpu);
    const double wanted_s = time_step(expected, machine, sharding).seconds;
    EXPECT_NEAR(time_step(composed, machine, sharding).seconds, wanted_s, 1e-9 * wanted_s) << place;
  }
}

// One pass, few, many, and some with a rest.
INSTANTIATE_TEST_SUITE_P(
    Stages, ComposedRank,
    ::testing::Values(RankSetting{"bf16", 0, 0}, RankSetting{"bf16", 0, 1}, RankSetting{"bf16", 0, 2},
                      RankSetting{"bf16", 0, 3}, RankSetting{"bf16", 12, 1}, RankSetting{"bf16", 12, 2},
                      RankSetting{"bf16", 12, 3}, RankSetting{"bf16", 3, 0}, RankSetting{"bf16", 3, 2},
                      RankSetting{"bf16", 3, 3}, RankSetting{"f32", 0, 1}, RankSetting{"f32", 8, 2},
                      RankSetting{"f32", 3, 3}),
    [](const auto& info) {
      return fmt::format("{}_{}_stage{}", info.param.dtype, info.param.micro_batch, info.param.zero_stage);
    });

}  // namespace
}  // namespace kiln
