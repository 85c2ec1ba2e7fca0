// The trace of one of several ranks that is composed of one rank's, against the trace itself.
#include "plan/ranks/rank_step.h"

#include <gtest/gtest.h>

#include "plan/plan_settings.h"
#include "plan/ranks/step_time.h"

namespace kiln {
namespace {

struct RankSetting {
  const char* dtype;
  int64_t micro_batch, zero_stage;
  double align_weight = 0;
};

class ComposedRank : public ::testing::TestWithParam<RankSetting> {
 protected:
  static PlanOptions options() {
    const auto& [dtype, micro_batch, zero_stage, align_weight] = GetParam();
    return test::plan_options(
        "A100-80G", 8,
        settings(fmt::format("model=DiT-S/4 depth=3 global-batch=256 compute-dtype={} micro-batch={} "
                             "zero-stage={} align-weight={}",
                             dtype, micro_batch, zero_stage, align_weight)));
  }
  static StepTrace of_rank(const PlanOptions& options) {
    return trace_step(options.train, describe(options.train).shape, DryRunDevice::kCuda, options.gpus);
  }
  static StepTrace composed_of(const StepTrace& source, const PlanOptions& options) {
    RankStep rank(source, sharding_of(options.train, options.gpus, planned_machine(options)));
    StepTrace composed = rank.trace(source);
    rank.add_checkpoint_part(composed);
    return composed;
  }
  static StepTrace alone(PlanOptions options) {
    TrainOptions train = test::rank_alone(options);
    train.zero.stage = train.zero.stage >= 2 ? 2 : 0;
    train.offload.optimizer = Placement::kDevice;
    return trace_step(train, describe(train).shape, DryRunDevice::kCuda);
  }
};

TEST_P(ComposedRank, HasTheSameBytes) {
  const StepTrace expected = of_rank(options()), composed = composed_of(alone(options()), options());
  EXPECT_EQ(composed.memory.persistent, expected.memory.persistent);
  EXPECT_EQ(composed.memory.peak_bytes, expected.memory.peak_bytes);
  EXPECT_EQ(composed.memory.peak_by_kind, expected.memory.peak_by_kind);
  ASSERT_EQ(composed.spans.size(), expected.spans.size());
  for (size_t i = 0; i < expected.spans.size(); ++i) {
    const Span &span = composed.spans[i], &wanted = expected.spans[i];
    ASSERT_EQ(std::tie(span.micro_step, span.phase, span.segment, span.times),
              std::tie(wanted.micro_step, wanted.phase, wanted.segment, wanted.times))
        << i;
    EXPECT_EQ(span.peak_bytes, wanted.peak_bytes) << name_of(span.phase) << " of " << span.segment;
    EXPECT_EQ(span.live_bytes, wanted.live_bytes) << name_of(span.phase) << " of " << span.segment;
  }
}

TEST_P(ComposedRank, DoesTheSameInTheSameTime) {
  const StepTrace expected = of_rank(options()), composed = composed_of(alone(options()), options());
  ASSERT_EQ(composed.spans.size(), expected.spans.size());
  for (size_t s = 0; s < expected.spans.size(); ++s) {
    const Span &span = composed.spans[s], &wanted_span = expected.spans[s];
    SCOPED_TRACE(
        fmt::format("{} of {} in micro-step {}", name_of(span.phase), span.segment, span.micro_step));
    ASSERT_EQ(span.ops.size(), wanted_span.ops.size());
    for (size_t i = 0; i < wanted_span.ops.size(); ++i) {
      const OpRecord &op = span.ops[i], &wanted = wanted_span.ops[i];
      ASSERT_EQ(op.name, wanted.name) << i;
      EXPECT_NEAR(op.bytes, wanted.bytes, 1e-9 * wanted.bytes) << i << " " << op.name;
      EXPECT_EQ(op.flops, wanted.flops) << i << " " << op.name;
    }
    ASSERT_EQ(span.collectives.size(), wanted_span.collectives.size());
    for (size_t i = 0; i < wanted_span.collectives.size(); ++i) {
      const CollectiveEvent &event = span.collectives[i], &wanted = wanted_span.collectives[i];
      EXPECT_EQ(std::tie(event.before_op, event.begins, event.start.number, event.start.operation,
                         event.start.bytes),
                std::tie(wanted.before_op, wanted.begins, wanted.start.number, wanted.start.operation,
                         wanted.start.bytes))
          << i;
    }
  }
  EXPECT_EQ(composed.under_way.size(), expected.under_way.size());
  EXPECT_EQ(composed.checkpoint_part_bytes, expected.checkpoint_part_bytes);
  const Sharding sharding = sharding_of(options().train, options().gpus, planned_machine(options()));
  const MachineProfile machine = find_profile(options().gpu);
  const double wanted_s = time_step(expected, machine, sharding).seconds;
  EXPECT_NEAR(time_step(composed, machine, sharding).seconds, wanted_s, 1e-9 * wanted_s);
}

// A rank is a state that steps follow one another on.
TEST_P(ComposedRank, MakesOneStepAfterAnother) {
  const StepTrace source = alone(options());
  const MachineProfile machine = planned_machine(options());
  const Sharding sharding = sharding_of(options().train, options().gpus, machine);
  RankStep rank(source, sharding);
  const StepTrace first = rank.trace(source), second = rank.trace(source);
  EXPECT_EQ(second.memory.peak_by_kind, first.memory.peak_by_kind);
  EXPECT_EQ(rank.persistent_bytes(), first.memory.persistent_bytes);
  EXPECT_EQ(second.under_way.size(), first.under_way.size());
  const double first_s = time_step(first, machine, sharding).seconds;
  EXPECT_NEAR(time_step(second, machine, sharding).seconds, first_s, 1e-9 * first_s);
}

TEST(RankStep, TracesAnewWhereATraceDoesNotTell) {
  PlanOptions options = test::plan_options(
      "A100-80G", 2, settings("model=DiT-S/8 depth=2 global-batch=32 micro-batch=4 zero-stage=2"));
  const DataShape data = describe(options.train).shape;
  const StepTrace divided = trace_step(options.train, data, DryRunDevice::kCuda, 2);
  const StepTrace alone = trace_of_rank(divided, {.gpus = 1});
  options.train.global_batch = 16;
  options.train.zero.stage = 0;
  const StepTrace expected = trace_step(options.train, data, DryRunDevice::kCuda);
  EXPECT_EQ(alone.memory.peak_bytes, expected.memory.peak_bytes);
  EXPECT_EQ(ops_of(alone.spans).size(), ops_of(expected.spans).size());
  EXPECT_THROW(RankStep(divided, {.gpus = 1}).trace(divided), std::logic_error);
}

TEST(RankStep, RanksThatDivideNothingDifferInTheirNumberAlone) {
  const PlanOptions options =
      test::plan_options("A100-80G", 1, settings("model=DiT-S/8 depth=2 global-batch=8 micro-batch=4"));
  const StepTrace alone = trace_step(options.train, describe(options.train).shape, DryRunDevice::kCuda);
  const MachineProfile machine = planned_machine(options);
  StepTrace changed = trace_of_rank(alone, {.gpus = 2});
  for (const Sharding& sharding : {Sharding{.gpus = 4}, Sharding{.gpus = 16, .ranks_per_node = 8}}) {
    ASSERT_TRUE(change_num_ranks(changed, sharding));
    const StepTrace expected = trace_of_rank(alone, sharding);
    EXPECT_EQ(changed.options.global_batch, expected.options.global_batch);
    ASSERT_EQ(changed.spans.size(), expected.spans.size());
    for (size_t i = 0; i < expected.spans.size(); ++i) {
      const auto &events = changed.spans[i].collectives, &wanted = expected.spans[i].collectives;
      ASSERT_EQ(events.size(), wanted.size());
      for (size_t k = 0; k < wanted.size(); ++k)
        EXPECT_EQ(std::tie(events[k].start.num_ranks, events[k].start.on_one_machine, events[k].start.bytes),
                  std::tie(wanted[k].start.num_ranks, wanted[k].start.on_one_machine, wanted[k].start.bytes));
    }
    EXPECT_EQ(time_step(changed, machine, sharding).seconds, time_step(expected, machine, sharding).seconds);
  }
  EXPECT_FALSE(change_num_ranks(changed, {.gpus = 1}));
  EXPECT_FALSE(change_num_ranks(changed, {.gpus = 16, .zero_stage = 1}));
}

// A trace of other ranks at the same stage gives the same time: scaling tables are made from one.
TEST_P(ComposedRank, TakesAsLongFromATraceOfOtherRanks) {
  PlanOptions others = options();
  others.gpus = 32;
  others.train.global_batch *= 4;
  const MachineProfile machine = planned_machine(others);
  const Sharding sharding = sharding_of(others.train, others.gpus, machine);
  const StepTime expected = time_step(of_rank(others), machine, sharding),
                 composed = time_step(trace_of_rank(of_rank(options()), sharding), machine, sharding);
  // Units that 32 ranks divide have an end to be zeroed that those of 8 may not have.
  EXPECT_NEAR(composed.seconds, expected.seconds, 5e-3 * expected.seconds);
  EXPECT_NEAR(composed.communication_s, expected.communication_s, 1e-6 * expected.communication_s);
}

TEST_P(ComposedRank, OffloadsTheSame) {
  for (const Placement place : {Placement::kHost, Placement::kNvme}) {
    PlanOptions offloading = options();
    offloading.train.offload.optimizer = place;
    const Sharding sharding = sharding_of(offloading.train, offloading.gpus, planned_machine(offloading));
    const StepTrace expected = of_rank(offloading), composed = composed_of(alone(offloading), offloading);
    EXPECT_EQ(composed.memory.persistent, expected.memory.persistent) << choice_name(place);
    EXPECT_EQ(composed.offloaded.host, expected.offloaded.host) << choice_name(place);
    EXPECT_EQ(composed.offloaded.disk, expected.offloaded.disk) << choice_name(place);
    EXPECT_EQ(composed.memory.peak_bytes, expected.memory.peak_bytes) << choice_name(place);
    const MachineProfile machine = find_profile(offloading.gpu);
    const double wanted_s = time_step(expected, machine, sharding).seconds;
    EXPECT_NEAR(time_step(composed, machine, sharding).seconds, wanted_s, 1e-9 * wanted_s)
        << choice_name(place);
  }
}

// One pass, few, many, and some with a rest.
INSTANTIATE_TEST_SUITE_P(
    Stages, ComposedRank,
    ::testing::Values(RankSetting{"bf16", 0, 0}, RankSetting{"bf16", 0, 1}, RankSetting{"bf16", 0, 2},
                      RankSetting{"bf16", 0, 3}, RankSetting{"bf16", 12, 1}, RankSetting{"bf16", 12, 2},
                      RankSetting{"bf16", 12, 3}, RankSetting{"bf16", 3, 0}, RankSetting{"bf16", 3, 2},
                      RankSetting{"bf16", 3, 3}, RankSetting{"f32", 0, 1}, RankSetting{"f32", 8, 2},
                      RankSetting{"f32", 3, 3}, RankSetting{"bf16", 3, 0, 0.5},
                      RankSetting{"bf16", 3, 3, 0.5}),
    [](const auto& info) {
      return fmt::format("{}_{}_stage{}{}", info.param.dtype, info.param.micro_batch, info.param.zero_stage,
                         info.param.align_weight > 0 ? "_head" : "");
    });

}  // namespace
}  // namespace kiln
