#include "plan/run/plan.h"

#include <algorithm>
#include <numeric>

#include "optim/optimizer.h"
#include "plan/memory/device_memory.h"
#include "plan/plan_settings.h"
#include "plan/price/price.h"
#include "plan/ranks/rank_step.h"
#include "plan/ranks/step_time.h"
#include "plan/report/report.h"
#include "test_files.h"
#include "train/checkpoint_files.h"

namespace kiln {
namespace {

using testing::Contains;

PlanOptions small_plan() {
  PlanOptions options;
  options.train.model.name = "DiT-S/4";
  options.train.compute.dtype = at::kBFloat16;
  options.gpu = "A100-80G";
  return options;
}

int64_t sum(const std::map<std::string, int64_t>& values) {
  int64_t total = 0;
  for (const auto& [name, value] : values) total += value;
  return total;
}

std::map<std::string, PhasePlan> phases_of(const Plan& plan) {
  std::map<std::string, PhasePlan> phases;
  for (const PhasePlan& phase : plan.phases) phases[phase.name] = phase;
  return phases;
}

StepTrace trace_of(const PlanOptions& options) {
  return trace_step(test::rank_alone(options), describe(options.train).shape, DryRunDevice::kCuda);
}

TEST(Plan, IsTheTraceOfTheStep) {
  const PlanOptions options = small_plan();
  const Plan plan = make_plan(options);
  const StepTrace trace = trace_of(options);
  EXPECT_EQ(plan.peak_bytes, trace.memory.peak_bytes + workspaces_bytes(plan.machine, false));
  EXPECT_EQ(workspaces_bytes(plan.machine, false), 2 * plan.machine.workspace_bytes)
      << "forward's and autograd's thread";
  EXPECT_EQ(sum(plan.by_kind), plan.peak_bytes);
  EXPECT_EQ(plan.peak_bytes + sum(plan.overhead), plan.reserved_bytes + plan.machine.context_bytes);
  EXPECT_GE(plan.needed_bytes, plan.reserved_bytes + plan.machine.context_bytes);
  EXPECT_NEAR(plan.step_s, price_step(trace.spans, plan.machine).seconds, 1e-9);
  EXPECT_NEAR(plan.step_s, std::accumulate(plan.phase_s.begin(), plan.phase_s.end(), 0.0), 1e-9);
  EXPECT_DOUBLE_EQ(plan.images_per_s, 256 / plan.step_s);
}

// One stream records all graphs, so cuBLAS takes as many workspaces again, however many shapes are recorded.
TEST(Plan, GraphsTakeWorkspacesOnce) {
  PlanOptions options = small_plan();
  const Plan plain = make_plan(options);
  options.train.compute.cuda_graph = true;
  EXPECT_EQ(make_plan(options).peak_bytes - plain.peak_bytes, 2 * plain.machine.workspace_bytes);
}

TEST(Plan, KeepingGeluTakesMemoryForTime) {
  PlanOptions options = small_plan();
  const Plan plain = make_plan(options);
  options.train.memory.keep_gelu = true;
  const Plan kept = make_plan(options);
  const int64_t hidden = 256 * 64 * 4 * 384 * 2;  // bytes of a block's
  EXPECT_GE(kept.peak_bytes - plain.peak_bytes, 11 * hidden);
  EXPECT_LT(kept.step_s, plain.step_s);
}

TEST(Plan, NamesTheEngineOfAttention) {
  PlanOptions options = small_plan();
  EXPECT_EQ(make_plan(options).attention, "flash");
  EXPECT_THAT(to_text(make_plan(options)), HasSubstr("attention by torch's flash kernels"));
  const auto notes = [&] { return make_plan(options).notes; };
  EXPECT_THAT(notes(), Not(Contains(HasSubstr("cuDNN's attention"))));
  options.gpu = "H100";
  EXPECT_THAT(notes(), Contains(HasSubstr("cuDNN's attention")));
  const test::TempFolder profiles;
  ::setenv("KILN_PROFILES", profiles.path().c_str(), 1);
  MachineProfile calibrated = find_profile("H200");
  calibrated.name = calibrated.machine = options.gpu = "NVIDIA H200";
  store_profile(calibrated);
  EXPECT_THAT(notes(), Contains(HasSubstr("cuDNN's attention")));
  ::unsetenv("KILN_PROFILES");
  options.gpu = "H100";
  options.train.compute.deterministic = true;
  EXPECT_THAT(notes(), Not(Contains(HasSubstr("cuDNN's attention"))));
}

TEST(Plan, CountsTheBytesOfEveryWeight) {
  const Plan plan = make_plan(small_plan());
  // Units are padded to 32 elements per weight.
  const auto per_weight = [&](const char* kind) {
    return static_cast<double>(plan.by_kind.at(kind)) / static_cast<double>(plan.num_weights);
  };
  EXPECT_NEAR(per_weight("weights"), 2, 0.01);
  EXPECT_NEAR(per_weight("master"), 4, 0.01);
  EXPECT_NEAR(per_weight("moments"), 8, 0.01);
  EXPECT_NEAR(per_weight("ema"), 4, 0.01);
}

TEST(Plan, PeakGrowsWithTheBatchAndFallsWithRecomputation) {
  int64_t before = 0;
  for (int64_t batch : {1, 2, 7, 8, 64, 65}) {
    PlanOptions options = small_plan();
    options.train.global_batch = batch;
    const int64_t peak = make_plan(options).peak_bytes;
    EXPECT_GT(peak, before) << batch;
    before = peak;
  }
  PlanOptions recomputed = small_plan();
  recomputed.train.memory.recompute = SegmentSet::all();
  const Plan less = make_plan(recomputed), all = make_plan(small_plan());
  EXPECT_LT(less.peak_bytes, all.peak_bytes / 2);
  EXPECT_GT(less.step_s, 1.2 * all.step_s);
  EXPECT_NEAR(less.peak_share.of_profile * less.step_s, all.peak_share.of_profile * all.step_s, 1e-9)
      << "recomputed work is no progress";
}

TEST(Plan, SaysWhatDoesNotFitAndWhatWould) {
  PlanOptions options = test::plan_options(
      "T4", 1, settings("model=DiT-XL/2 global-batch=16 compute-dtype=fp16 recompute=all"));
  Plan plan = make_plan(options);
  EXPECT_TRUE(plan.fits) << plan.needed_bytes << " of " << plan.machine.memory_bytes;
  options.train.memory.recompute = SegmentSet();
  plan = make_plan(options);
  EXPECT_FALSE(plan.fits);
  EXPECT_GT(plan.needed_bytes, plan.machine.memory_bytes);
  // Friction 21 of a new user: only a search was named.
  EXPECT_THAT(plan.advice,
              Contains(HasSubstr("--micro-batch -1 --memory-budget auto chooses smaller passes")));

  options.gpu = "RTX-4090";
  options.gpus = 4;
  options.train = changed(options.train, "recompute=all ema-decay=[0.9,0.99,0.995,0.999,0.9999]");
  plan = make_plan(options);
  EXPECT_FALSE(plan.fits);
  EXPECT_THAT(plan.advice, Contains(HasSubstr("--zero-stage 1")));
  options.train.zero.stage = 1;
  EXPECT_TRUE(make_plan(options).fits);
}

TEST(Plan, OffloadedStateIsNotOnTheGpu) {
  PlanOptions options = small_plan();
  options.gpus = 8;
  const StepTrace trace = trace_of(options);
  const int64_t elements =
      std::accumulate(trace.segment_weights.begin(), trace.segment_weights.end(), int64_t{0});
  const auto offloaded = [&](Placement place) {
    return trace_of_rank(trace, {.gpus = 8, .zero_stage = 2, .offload = {.optimizer = place}});
  };
  const StepTrace host = offloaded(Placement::kHost), disk = offloaded(Placement::kNvme);
  for (MemoryKind kind : {MemoryKind::kMaster, MemoryKind::kMoments, MemoryKind::kEma})
    EXPECT_FALSE(host.memory.persistent.contains(kind));
  EXPECT_GE(host.offloaded.host, 2 * elements);  // 16 bytes of 8 ranks each
  EXPECT_GE(disk.offloaded.disk, 2 * elements);
  EXPECT_EQ(host.offloaded.disk, 0);
  options.train.zero.stage = 2;
  options.train.offload.optimizer = Placement::kHost;
  const StepTrace rank = trace_step(options.train, describe(options.train).shape, DryRunDevice::kCuda, 8);
  EXPECT_EQ(host.memory.persistent, rank.memory.persistent);
  EXPECT_EQ(host.offloaded.host, rank.offloaded.host);
}

// A bf16 master on the host becomes f32 there for its unit's update: the GPU holds none of it, with any
// optimizer, and the host room for the largest unit.
TEST(Plan, OffloadedBf16MastersAreWideOnTheHostAlone) {
  PlanOptions options = small_plan();
  options.train.offload.optimizer = Placement::kHost;
  for (const std::string& name : optimizer_names()) {
    SCOPED_TRACE(name);
    options.train.optimizer.name = name;
    const auto trace_with = [&](at::ScalarType master) {
      options.train.compute.master_dtype = master;
      return trace_step(options.train, describe(options.train).shape, DryRunDevice::kCuda, 1);
    };
    const StepTrace wide = trace_with(at::kFloat), narrow = trace_with(at::kBFloat16);
    EXPECT_EQ(narrow.memory.peak_bytes, wide.memory.peak_bytes);
    const int64_t weights =
        std::accumulate(wide.segment_weights.begin(), wide.segment_weights.end(), int64_t{0});
    const int64_t largest = std::ranges::max(wide.segment_weights);
    EXPECT_NEAR(static_cast<double>(wide.offloaded.host - narrow.offloaded.host),
                static_cast<double>(2 * weights - 4 * largest), 0.001 * static_cast<double>(weights));
  }
}

// One GPU offloads its weights too: they pass through it segment by segment.
TEST(Plan, OffloadedWeightsAreNotOnTheGpu) {
  PlanOptions options = small_plan();
  const MachineProfile machine = find_profile("A100-80G");
  for (const int64_t gpus : {1, 8}) {
    options.gpus = gpus;
    const StepTrace trace = trace_of(options);
    for (const Placement place : {Placement::kHost, Placement::kNvme}) {
      const Sharding sharding{
          .gpus = gpus, .zero_stage = 3, .offload = {.optimizer = Placement::kHost, .params = place}};
      PlanOptions offloaded = options;
      offloaded.train.zero.stage = 3;
      offloaded.train.offload.optimizer = Placement::kHost;
      offloaded.train.offload.params = place;
      offloaded.train.offload.nvme.folder = ".";
      const StepTrace rank =
          trace_step(offloaded.train, describe(options.train).shape, DryRunDevice::kCuda, gpus);
      const StepTrace composed = trace_of_rank(trace, sharding);
      EXPECT_FALSE(rank.memory.persistent.contains(MemoryKind::kWeights));
      EXPECT_EQ(composed.memory.persistent, rank.memory.persistent) << choice_name(place) << " on " << gpus;
      EXPECT_EQ(composed.offloaded.host, rank.offloaded.host) << choice_name(place) << " on " << gpus;
      EXPECT_EQ(composed.offloaded.disk, rank.offloaded.disk) << choice_name(place) << " on " << gpus;
      const int64_t weights =
          rank.num_weights * static_cast<int64_t>(c10::elementSize(rank.unit.compute_dtype));
      EXPECT_EQ(rank.offloaded.disk >= weights / gpus, place == Placement::kNvme);
      Sharding without = sharding;
      without.offload.params = Placement::kDevice;
      EXPECT_GT(time_step(rank, machine, sharding).seconds, time_step(rank, machine, without).seconds);
      EXPECT_TRUE(make_plan(offloaded).step_s > 0);
    }
  }
}

TEST(Plan, CommunicationHidesBehindTheBackward) {
  PlanOptions options = small_plan();
  options.gpus = 8;
  options.train.global_batch = 512;
  const StepTrace trace = trace_of(options);
  const auto waits = [](const StepTime& time) {
    return time.by_phase[static_cast<size_t>(StepPhase::kCommunication)];
  };
  const MachineProfile fast = find_profile("A100-80G");
  const auto time_on = [&](const MachineProfile& machine, const Sharding& sharding) {
    return time_step(trace_of_rank(trace, sharding), machine, sharding);
  };
  const StepTime alone = time_on(fast, {}), together = time_on(fast, {.gpus = 8});
  EXPECT_EQ(waits(alone), 0);
  EXPECT_EQ(alone.communication_s, 0);
  EXPECT_GT(together.communication_s, 0);
  EXPECT_LT(waits(together), 0.5 * together.communication_s);

  MachineProfile slow = fast;
  slow.peer_bytes_per_s = 1e8;
  const StepTime stuck = time_on(slow, {.gpus = 8});
  // 2 (N - 1) / N of the gradients, less what the backward hides.
  const double gradients = static_cast<double>(trace.memory.persistent.at(MemoryKind::kGradients));
  EXPECT_NEAR(stuck.communication_s, 2 * 7.0 / 8 * gradients / 1e8, 0.02 * stuck.communication_s);
  EXPECT_GT(waits(stuck), 0.8 * stuck.communication_s);
  // Stage 3 moves half as much again.
  EXPECT_NEAR(time_on(slow, {.gpus = 8, .zero_stage = 3}).communication_s / stuck.communication_s, 1.5, 0.02);
}

TEST(Plan, ScalesByRanksAndFillsInTheRun) {
  PlanOptions options = small_plan();
  options.gpus = 8;
  options.steps = 1000;
  options.price_per_gpu_hour = 2;
  const Plan plan = make_plan(options);
  EXPECT_EQ(plan.rank_batch, 32);
  EXPECT_EQ(plan.scaling.front().gpus, 1);
  EXPECT_EQ(plan.scaling.back().gpus, 1024);
  for (const ScalingPoint& point : plan.scaling) {
    EXPECT_LE(point.efficiency, 1.0) << point.gpus;
    if (point.gpus == 8) {
      EXPECT_DOUBLE_EQ(point.images_per_s, plan.images_per_s);
    }
  }
  EXPECT_DOUBLE_EQ(plan.days * 86400, 1000 * plan.step_s);
  EXPECT_DOUBLE_EQ(plan.cost, plan.days * 24 * 8 * 2);
  EXPECT_EQ(plan.samples.num_samples, 1281167);
  EXPECT_EQ(plan.samples.store_bytes(), plan.samples.num_samples * 2 * 4 * 32 * 32 * 4);
}

// Of 200 steps it said what 1,024 GPUs gain, and "0 GPU hours, 0 kWh, cost 0".
TEST(Plan, AShortRunIsToldWhatItTakes) {
  PlanOptions options = small_plan();
  options.price_per_gpu_hour = 2;
  options.steps = 200;
  const Plan brief = make_plan(options);
  options.steps = 4'000'000;
  const Plan whole = make_plan(options);
  const auto shows_others = HasSubstr("The same images per GPU");
  for (const auto& text : {to_text(brief), to_html(brief)}) EXPECT_THAT(text, Not(shows_others));
  for (const auto& text : {to_text(whole), to_html(whole)}) EXPECT_THAT(text, shows_others);
  for (const Plan& plan : {brief, whole})
    EXPECT_EQ(to_json(plan).at("predicted").at("scaling").back().at("gpus"), 1024);
  EXPECT_THAT(to_text(brief), HasSubstr(" kWh, cost < 0.01\n"));
  EXPECT_THAT(to_text(brief), AllOf(Not(HasSubstr(" 0 GPU hours")), Not(HasSubstr(" 0 kWh"))));
  EXPECT_THAT(to_html(brief), HasSubstr(R"(, cost \u003c 0.01")"));
  EXPECT_EQ(cost_text(options, 0.0234), "0.02");
  EXPECT_EQ(cost_text(options, 12.3, "cost "), "cost 12.30");
  EXPECT_EQ(cost_text(options, 1234.4), "1234");
  options.price_per_gpu_hour = 0;
  EXPECT_EQ(cost_text(options, 0, ", cost "), "");
}

// Composed from the trace of one number of GPUs, the others are what planning each says.
TEST(Plan, OtherNumbersOfGpusAreWhatTheirOwnPlansSay) {
  for (const char* params : {"none", "cpu"}) {
    PlanOptions options = test::plan_options(
        "RTX-4090", 4,
        settings("model=DiT-S/4 depth=2 global-batch=128 micro-batch=8 compute-dtype=bf16 zero-stage=3 "
                 "offload-params=" +
                 std::string(params)));
    for (const ScalingPoint& point : make_plan(options).scaling) {
      if (point.gpus > 16) break;
      PlanOptions other = options;
      other.gpus = point.gpus;
      other.train.global_batch = 32 * point.gpus;
      if (point.gpus == 1 && params == std::string("none")) other.train.zero.stage = 0;
      EXPECT_NEAR(point.step_s, make_plan(other).step_s, 1e-9 * point.step_s) << point.gpus << " " << params;
    }
  }
}

// Sixteen GPUs on two machines: with copies on each, only reduced shards cross the slow link.
TEST(Plan, KnowsMachinesThatHoldCopies) {
  PlanOptions options = small_plan();
  options.gpus = 16;
  options.train.zero.stage = 3;
  const Plan divided = make_plan(options);
  options.train.zero.shard_within_node = true;
  const Plan copies = make_plan(options);
  EXPECT_LT(copies.communication_s, divided.communication_s);
  EXPECT_NEAR(
      static_cast<double>(copies.by_kind.at("moments")) / static_cast<double>(divided.by_kind.at("moments")),
      2, 0.02);
  options.gpus = 8;
  const Plan alone = make_plan(options);
  options.train.zero.shard_within_node = false;
  EXPECT_EQ(alone.communication_s, make_plan(options).communication_s);
  options.gpus = 12;
  options.train.global_batch = 240;
  options.train.zero.shard_within_node = true;
  EXPECT_ERROR(make_plan(options), "--shard-within-node");
}

TEST(Plan, PhasesOutsideTheStepAreTraced) {
  PlanOptions options = small_plan();
  options.train.global_batch = 8;
  options.train.samples.every = 100;
  options.train.data.autoencoder = "an autoencoder";
  options.train.validation.data = "a store";
  const Plan plan = make_plan(options);
  auto phases = phases_of(plan);
  for (const char* name :
       {"load", "first step", "steady step", "validation", "validation sampling", "checkpoint", "resume"})
    EXPECT_TRUE(phases.contains(name)) << name;
  // A forward pass with the average where the weights are: less than a step, more than the state.
  EXPECT_LT(phases["validation"].live_bytes, phases["steady step"].live_bytes);
  EXPECT_GT(phases["validation"].live_bytes, phases["checkpoint"].live_bytes);
  // Eight images decoded at once need more than a small model's step.
  EXPECT_GT(phases["validation sampling"].bytes.device, phases["steady step"].bytes.device);
  EXPECT_EQ(plan.needed_phase, "validation sampling");
  EXPECT_NEAR(static_cast<double>(plan.by_kind.at("autoencoder")), 2 * 83.65e6, 0.01 * 2 * 83.65e6);
  EXPECT_EQ(phases["steady step"].live_bytes, plan.peak_bytes);
  // Its own loader, beside that of the training.
  EXPECT_GT(phases["validation"].bytes.host, phases["steady step"].bytes.host);
  // Master, EMA and two moments are copied to the host, and written while a validation may run.
  // So are the untrained weights: the positions of the patches.
  const int64_t num_patches = 8 * 8, width = 384;
  EXPECT_EQ(phases["checkpoint"].bytes.host - phases["validation"].bytes.host,
            16 * plan.num_weights + 4 * num_patches * width);
  options.train.checkpoints.copy = CheckpointCopy::kPageCache;
  EXPECT_EQ(phases_of(make_plan(options)).at("checkpoint").bytes.host, phases["steady step"].bytes.host);
}

// A validation perturbs no input, so neither its batches nor its tensors have the noise of a step's.
TEST(Plan, OnlyStepsHaveNoiseOfInputs) {
  PlanOptions options = small_plan();
  options.train.global_batch = 8;
  options.train.validation.data = "a store";
  auto plain = phases_of(make_plan(options));
  options.train.objective.input_perturbation = 0.1;
  auto perturbed = phases_of(make_plan(options));
  EXPECT_EQ(perturbed["validation"].live_bytes, plain["validation"].live_bytes);
  EXPECT_GT(perturbed["steady step"].bytes.host, plain["steady step"].bytes.host);
  EXPECT_EQ(perturbed["validation"].bytes.host - perturbed["steady step"].bytes.host,
            plain["validation"].bytes.host - plain["steady step"].bytes.host);
}

// A batch of a step has a sample more where losses compare samples; a validation compares none.
TEST(Plan, OnlyStepsHaveAHalo) {
  PlanOptions options = small_plan();
  options.train.objective.name = "flow";
  options.train.validation.data = "a store";
  auto plain = phases_of(make_plan(options));
  options.train.objective.contrastive_weight = 0.05;
  auto contrastive = phases_of(make_plan(options));
  EXPECT_EQ(contrastive["validation"].live_bytes, plain["validation"].live_bytes);
  const int64_t more = contrastive["steady step"].bytes.host - plain["steady step"].bytes.host;
  EXPECT_GT(more, 0);
  EXPECT_EQ(contrastive["validation"].bytes.host - plain["validation"].bytes.host, more);
}

TEST(Plan, AdvisesWithTheOptionToChange) {
  PlanOptions good = small_plan();
  good.train.data.loader_threads = 4;
  EXPECT_THAT(make_plan(good).advice, IsEmpty());

  const struct {
    const char *gpu, *changes, *advice;
    int64_t gpus = 1;
  } rows[] = {
      {"A100-80G", "micro-batch=12", "--micro-batch 8"},
      {"A100-80G", "compute-dtype=f32", "--compute-dtype bf16"},
      {"T4", "model=DiT-XL/2 compute-dtype=fp16", "kiln plan --search --gpu T4 --gpus 1 --model DiT-XL/2"},
      {"A100-80G", "global-batch=4096 micro-batch=256", "--global-batch 256"},
      {"A100-80G", "lr=0.01", "--lr 0.0001"},
      {"B200", "model=DiT-S/8 depth=2 loader-threads=1", "the disk ("},
      {"B200", "model=DiT-S/8 depth=2 loader-threads=1", "--loader-threads 3"},
      {"A100-80G", "offload-optimizer=nvme", "--offload-optimizer none"},
      // Few images a step over Ethernet: weights and gradients travel all the same.
      {"L40S", "global-batch=64 zero-stage=3", "of the step waits for the link between GPUs", 8}};
  for (const auto& row : rows) {
    PlanOptions options = good;
    options.gpu = row.gpu;
    options.gpus = row.gpus;
    options.train = changed(options.train, row.changes);
    EXPECT_THAT(make_plan(options).advice, Contains(HasSubstr(row.advice))) << row.gpu << " " << row.changes;
  }
  const StepTrace trace = trace_of(good);
  MachineProfile machine = find_profile(good.gpu);
  const auto with_used_share = [&](double share) {
    const int64_t needed = make_plan(good).needed_bytes;
    machine.memory_bytes = static_cast<int64_t>(static_cast<double>(needed) / share);
    return compose_plan(good, machine, read_data_outlook(good), trace).advice;
  };
  EXPECT_THAT(with_used_share(0.9), Contains(HasSubstr("90 % of the memory is used")));
  EXPECT_THAT(with_used_share(0.8), Not(Contains(HasSubstr("of the memory is used"))));
}

// DiT-XL's 800 GiB brought no advice, whatever the disk.
TEST(Plan, AdvisesFewerCheckpointsThanFillTheDisk) {
  PlanOptions options = small_plan();
  options.train.model.depth = 1;
  options.train.checkpoints.every = 1;
  constexpr int64_t kGibibyte = int64_t{1} << 30;
  const int64_t each = make_plan(options).checkpoint_bytes;
  const auto advice = [&](int64_t bytes) {
    options.steps = bytes / each;
    return make_plan(options).advice;
  };
  const auto is_told = [](const char* where) { return Contains(has_all(where, ": --keep-checkpoints 3")); };
  EXPECT_THAT(advice(300 * kGibibyte), is_told("of the 512 GiB that a usual disk has free"));
  EXPECT_THAT(advice(200 * kGibibyte), Not(Contains(HasSubstr("--keep-checkpoints"))));
  const test::TempFolder folder;
  options.train.out = folder / "run";  // which is not there yet
  const int64_t room = available_bytes(folder.path().string());
  EXPECT_THAT(advice(room), is_told("that are free where --out is"));
  EXPECT_THAT(advice(room / 4), Not(Contains(HasSubstr("--keep-checkpoints"))));
}

TEST(Plan, SaysWhichGpuThisBuildNoLongerRunsOn) {
  const auto advice = [](const std::string& gpu) {
    PlanOptions options = small_plan();
    options.gpu = gpu;
    options.train.compute.dtype = at::kHalf;
    return make_plan(options).advice;
  };
  const auto is_told = Contains(HasSubstr("does not run on a V100"));
  EXPECT_THAT(advice("V100"), is_told);
  EXPECT_THAT(advice("T4"), Not(is_told));
}

TEST(Plan, RefusesNonsenseInOneLine) {
  const auto refuses = [](auto change, const std::string& message) {
    PlanOptions options = small_plan();
    change(options);
    EXPECT_ERROR(make_plan(options), message);
  };
  refuses([](PlanOptions& o) { o.gpu = "A100-80H"; }, "A100-80G");
  refuses([](PlanOptions& o) { o.gpus = 7; }, "give --global-batch 252, or --global-batch 259");
  refuses([](PlanOptions& o) { o.gpus = 0; }, "--gpus");
  refuses([](PlanOptions& o) { o.train.zero.stage = 2; }, "give --gpus 2, or --zero-stage 0");
  refuses([](PlanOptions& o) { o.train.offload.params = Placement::kNvme; }, "needs --zero-stage 3");
  refuses([](PlanOptions& o) { o.gpu = "V100"; }, "fp16");
  refuses([](PlanOptions& o) { o.train.data.path = "/no such store"; }, "--data");
  refuses([](PlanOptions& o) { o.price_per_gpu_hour = -1; }, "--price-per-gpu-hour");
  refuses([](PlanOptions& o) { o.train.micro_batch = 257; }, "--micro-batch");
}

// As in training: a rank that has fewer images takes them in one pass.
TEST(Plan, PassesAreNoLargerThanWhatAGpuHas) {
  const auto with = [](int64_t micro_batch) {
    PlanOptions options = small_plan();
    options.gpus = 8;
    options.train.micro_batch = micro_batch;
    return make_plan(options);
  };
  const Plan more = with(64), whole = with(32);
  EXPECT_EQ(more.micro_batch, 32);
  EXPECT_EQ(more.num_micro_steps, 1);
  EXPECT_EQ(more.peak_bytes, whole.peak_bytes);
  EXPECT_EQ(more.step_s, whole.step_s);
  const auto is_told = Contains(HasSubstr("--micro-batch 64 is more than the 32 images"));
  EXPECT_THAT(more.advice, is_told);
  EXPECT_THAT(whole.advice, Not(is_told));
}

// Blocks that are cached and too small for the next one go back to the device before memory runs out.
TEST(Plan, FitsWhenTheAllocatorGivesBackWhatItCaches) {
  PlanOptions options = small_plan();
  options.train.memory.recompute = SegmentSet::all();
  const StepTrace trace = trace_of(options);
  MachineProfile machine = find_profile(options.gpu);
  const auto plan_with = [&](int64_t memory) {
    machine.memory_bytes = memory;
    return compose_plan(options, machine, read_data_outlook(options), trace);
  };
  const Plan ample = plan_with(int64_t{1} << 40);
  const int64_t least = ample.peak_bytes + machine.context_bytes;
  const Plan impossible = plan_with(least - 1);
  EXPECT_FALSE(impossible.fits);
  EXPECT_GE(impossible.needed_bytes, least);
  EXPECT_LE(impossible.needed_bytes, ample.needed_bytes);
  const Plan exact = plan_with(impossible.needed_bytes);
  EXPECT_TRUE(exact.fits);
  EXPECT_EQ(exact.peak_bytes, ample.peak_bytes);
  EXPECT_LE(exact.needed_bytes, impossible.needed_bytes);
}

TEST(DeviceTimeline, ReusesWhatItReserved) {
  constexpr int64_t kMiB = 1 << 20;
  const MemoryEvents state = {{1, 30 * kMiB}}, step = {{2, 40 * kMiB}, {2, -40 * kMiB}};
  DeviceTimeline timeline(/*caching=*/true, /*capacity_bytes=*/0);
  EXPECT_EQ(timeline.play(state).reserved_bytes, 30 * kMiB);
  EXPECT_EQ(timeline.play(step).reserved_bytes, 70 * kMiB);
  const DeviceTimeline::Peak again = timeline.play(step);
  EXPECT_EQ(again.reserved_bytes, 70 * kMiB);
  EXPECT_EQ(again.live_bytes, 70 * kMiB);

  DeviceTimeline tight(/*caching=*/true, 60 * kMiB);
  tight.play(state);
  EXPECT_FALSE(tight.out_of_memory());
  tight.play(step);
  EXPECT_TRUE(tight.out_of_memory());
}

}  // namespace
}  // namespace kiln
