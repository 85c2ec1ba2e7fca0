// The memory budget: sizes, refusals, the command that fits.
#include "plan/fit/budget.h"

#include <ATen/Parallel.h>

#include "plan/report/report.h"
#include "plan/run/make_plan.h"
#include "run/option_values.h"
#include "test_files.h"
#include "train/settings.h"
#include "train/usable_options.h"

namespace kiln {
namespace {

TrainOptions small_options(const char* changes = "") {
  return changed(changed(test::usable_options(), "model=DiT-S/2 global-batch=32 device=cpu"), changes);
}

int64_t peak_of(const FittedRun& run) { return run.predicted.at("peak_bytes"); }

TEST(MemoryBudget, ReadsSizes) {
  EXPECT_EQ(MemoryBudget::parse("800M").bytes(), 800 << 20);
  EXPECT_EQ(MemoryBudget::parse("12G").bytes(), int64_t{12} << 30);
  EXPECT_EQ(MemoryBudget::parse("11.5GiB").bytes(), int64_t{23} << 29);
  EXPECT_EQ(MemoryBudget::parse("2GB").bytes(), 2'000'000'000);
  EXPECT_EQ(MemoryBudget::parse("4096").bytes(), 4096);
  for (const char* bad : {"much", "12X", "-1G", "0", "G", "1G2", "nan", "inf"})
    EXPECT_ERROR(MemoryBudget::parse(bad), "--memory-budget expects") << bad;
}

TEST(CommandLine, NamesWhatIsNotDefault) {
  TrainOptions options = small_options("flip=false tf32=true ema-decay=[0.99,0.5]");
  options.out = "my run";
  EXPECT_EQ(command_line(options),
            "kiln train --data synthetic --out 'my run' --no-flip --global-batch 32 --ema-decay 0.99,0.5 "
            "--device cpu --tf32");
}

TEST(CommandLine, SaysNone) {
  EXPECT_THAT(command_line(small_options("ema-decay=[]")), HasSubstr(" --ema-decay none "));
}

TEST(MemoryShare, IsSaidAndWarnedOfAbove85Percent) {
  const FittedRun run = fit_run(small_options());
  ASSERT_GT(run.needed_bytes, 0);
  ASSERT_GE(run.free_bytes, run.needed_bytes);
  FittedRun much = run;
  much.free_bytes = run.needed_bytes * 10 / 9;
  EXPECT_THAT(memory_share(much).text, HasSubstr("that are free (90 %)"));
  EXPECT_THAT(memory_share(much).warning, HasSubstr("90 % of the memory"));
  much.free_bytes = run.needed_bytes * 2;
  EXPECT_THAT(memory_share(much).text, HasSubstr("(50 %)"));
  EXPECT_EQ(memory_share(much).warning, "");
  EXPECT_EQ(memory_share({.options = small_options(), .summary = {}}).text, "");
}

TEST(Budget, RecomputesMoreWhereLessIsAllowed) {
  const FittedRun all = fit_run(small_options("memory-budget=64G"));
  EXPECT_EQ(all.options.memory.recompute, SegmentSet());
  EXPECT_THAT(all.summary, HasSubstr("memory budget 64.00 GiB"));
  const FittedRun less = fit_run(small_options("memory-budget=2500M"));
  EXPECT_NE(less.options.memory.recompute, SegmentSet());
  EXPECT_LT(peak_of(less), peak_of(all));
  EXPECT_LT(peak_of(less), MemoryBudget::parse("2500M").bytes());
}

// Without GELU's results nothing has to be recomputed in the smaller memory.
TEST(Budget, KeepsGeluWhereMemoryIsFree) {
  const auto fitted = [](const std::string& budget) {
    const TrainOptions options = changed(
        TrainOptions(), settings("model=DiT-S/4 compute-dtype=bf16 untried-gpu=all memory-budget=" + budget));
    return fit_planned(options, find_profile("H200"), /*gpus=*/1, option_on_command_line);
  };
  const FittedRun roomy = fitted("64G");
  EXPECT_TRUE(roomy.options.compute.untried_gpu.has(Untried::kKeepGelu));
  const auto needed = roomy.predicted.at("needed_bytes").get<int64_t>();
  const FittedRun tight = fitted(std::to_string((needed - (500 << 20)) / 1024) + "K");
  EXPECT_FALSE(tight.options.compute.untried_gpu.has(Untried::kKeepGelu));
  EXPECT_TRUE(tight.options.memory.recompute.is_none());
}

// Steps go on while a copy of the state is written.
TEST(Budget, CountsACopyOfTheState) {
  const FittedRun files = fit_run(small_options("memory-budget=2500M")),
                  copies = fit_run(small_options("memory-budget=2500M checkpoint-copy=memory"));
  EXPECT_LT(peak_of(copies) + (400 << 20), peak_of(files));
  EXPECT_TRUE(copies.gives_memory_back);
}

TEST(Budget, CopiesTheStateWhereTheHostHasRoom) {
  PlanOptions options;
  options.gpu = "A100-80G";
  options.train = small_options("depth=2");
  Plan plan = make_plan(options);
  int64_t stepping = 0, saving = 0;
  for (const PhasePlan& phase : plan.phases) {
    int64_t& most = phase.name == "checkpoint" ? saving : stepping;
    most = std::max(most, phase.bytes.host + phase.bytes.pinned_host);
  }
  ASSERT_GT(saving, stepping);
  EXPECT_EQ(fitted_checkpoint_copy(plan, saving), CheckpointCopy::kAuto);
  EXPECT_EQ(fitted_checkpoint_copy(plan, saving - 1), CheckpointCopy::kPageCache);
  EXPECT_ERROR(fitted_checkpoint_copy(plan, stepping - 1), "of host memory that each rank has");
  options.train.checkpoints.copy = CheckpointCopy::kMemory;
  plan = make_plan(options);
  EXPECT_EQ(fitted_checkpoint_copy(plan, saving), CheckpointCopy::kMemory);
  EXPECT_ERROR(fitted_checkpoint_copy(plan, saving - 1), "--checkpoint-copy page-cache");
}

TEST(Budget, ChoosesTheMicroBatchWhenAsked) {
  TrainOptions options = small_options("depth=4 global-batch=64 micro-batch=-1");
  EXPECT_ERROR(fit_run(options), "give --memory-budget auto");
  options.memory.budget = MemoryBudget::parse("2500M");
  const FittedRun run = fit_run(options);
  EXPECT_GT(run.options.micro_batch, 0);
  EXPECT_LT(run.options.micro_batch, 64);
  EXPECT_THAT(run.summary, HasSubstr(fmt::format("--micro-batch {} ", run.options.micro_batch)));
  options.memory.budget = MemoryBudget::parse("64G");
  EXPECT_EQ(fit_run(options).options.micro_batch, 0) << "the whole batch fits";
}

// The literal command that has to work anywhere, on a machine with 4 GiB to spare.
TEST(Budget, AProbeChoosesItsMicroBatchWhereTheWholeBatchDoesNotFit) {
  TrainOptions options = small_options("global-batch=256");
  FitTerms terms{.may_choose_micro_batch = false, .host_bytes = int64_t{4} << 30};
  EXPECT_ERROR(fit_run(options, {}, terms), "this fits, ");
  terms.may_choose_micro_batch = true;
  const FittedRun run = fit_run(options, {}, terms);
  EXPECT_GT(run.options.micro_batch, 0);
  EXPECT_LT(run.options.micro_batch, 256);
  EXPECT_LT(peak_of(run), terms.host_bytes);
  EXPECT_THAT(run.summary, has_all("in one pass the run needs",
                                   fmt::format("--micro-batch {} ", run.options.micro_batch)));
  options.global_batch = 8;
  const FittedRun fits = fit_run(options, {}, terms);
  EXPECT_EQ(fits.options.micro_batch, 0) << "what fits stays as it is";
  EXPECT_EQ(fits.summary, "");
}

TEST(Budget, RanksOfAMachineShareItsMemory) {
  EXPECT_THAT(fit_run(small_options("memory-budget=8G"), {.world_size = 2, .local_world_size = 2}).summary,
              HasSubstr("memory budget 4.00 GiB for each of 2 ranks"));
}

// A launcher may have given each rank processors of its own: what is measured for a budget has the threads
// that the rank will train with.
TEST(Budget, MeasuresWithTheThreadsOfItsRank) {
  const int before = at::get_num_threads();
  TrainOptions options = small_options("depth=1 memory-budget=64G");
  for (const int share : {1, 2}) {
    fit_run(options, {.world_size = 2, .local_world_size = 2}, {.cpu_share = share});
    EXPECT_EQ(at::get_num_threads(), share);
  }
  options.compute.threads = 1;
  options.memory.budget = {};
  fit_run(options, {}, {.cpu_share = 2});
  EXPECT_EQ(at::get_num_threads(), 1);
  at::set_num_threads(before);
}

TEST(Budget, PlansARanksShare) {
  const TrainOptions options = small_options("memory-budget=16G global-batch=8 zero-stage=2");
  const auto peak = [&](const Ranks& ranks) { return peak_of(fit_run(options, ranks)); };
  EXPECT_LT(peak({.world_size = 4, .local_world_size = 4}), peak({.world_size = 1}) / 2);
}

TEST(Budget, RefusalEndsInOptionsThatFit) {
  EXPECT_THAT(message_of([] { fit_run(small_options("global-batch=256 memory-budget=2500M")); }),
              AllOf(has_all("--memory-budget 2500M", "GiB: --micro-batch"), Not(HasSubstr("kiln train"))));
  // The process alone is larger.
  EXPECT_ERROR(fit_run(small_options("global-batch=256 memory-budget=100M depth=2")),
               "no smaller --micro-batch fits either");
}

TEST(Budget, PreflightRefusesWhatTheMachineDoesNotHold) {
  TrainOptions options = small_options("model=DiT-XL/2 depth=4 global-batch=16384");
  EXPECT_ERROR(fit_run(options), "--no-preflight");
  options.memory.preflight = false;
  EXPECT_NO_THROW(fit_run(options));
}

}  // namespace
}  // namespace kiln
