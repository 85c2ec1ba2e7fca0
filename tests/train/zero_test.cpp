// ZeRO over real ranks: every stage trains what one rank trains, holds what the formula says and sends no
// more.
#include "parallel/zero/zero.h"
#include "core/aten.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <set>
#include <tuple>

#include "parallel/rank_threads.h"
#include "train/placements.h"

namespace kiln {
namespace {

using test::rows_of;
using test::TinyOptions;
using test::TinyTraining;
using test::worst_relative;

constexpr int64_t kDividedBatch = 9;  // 2, 3 and 4 ranks have uneven or even rows of it
constexpr int64_t kMatrixBatch = 13;  // all have uneven ones

struct ZeroOutcome {
  std::vector<double> losses;
  at::Tensor master, ema;  // all slots of all units, one after another
};

at::Tensor slots_of(const TinyTraining& tiny, at::Tensor (*buffer)(const StateLease&)) {
  std::vector<at::Tensor> slots;
  for (size_t s = 0; s < tiny.state->segments.size(); ++s) {
    FlatUnit& unit = tiny.state->segments[s].unit;
    const StateLease state = unit.lease(Access::kRead);
    const at::Tensor whole = tiny.state->zero->whole(s, buffer(state));
    for (size_t i = 0; i < unit.layout().slots.size(); ++i)
      slots.push_back(unit.view(whole, i).flatten().clone());
  }
  return at::cat(slots);
}

at::Tensor master_of(const StateLease& state) { return state.master; }
at::Tensor ema_of(const StateLease& state) { return state.emas[0]; }

// Trains on one rank of a group; the same on every rank.
ZeroOutcome outcome_of(const TinyTraining& tiny, int64_t num_steps, int64_t global_batch) {
  const ProcessGroup& group = tiny.state->zero->group();
  ZeroOutcome outcome;
  for (int64_t step = 0; step < num_steps; ++step) {
    const StepBatch batch = tiny.batch(global_batch, static_cast<uint64_t>(step));
    const StepResult result = tiny.step->run(rows_of(batch, group), 1e-3);
    EXPECT_TRUE(result.applied);
    EXPECT_EQ(result.losses.size(), static_cast<size_t>(global_batch));
    outcome.losses.push_back(result.loss);
  }
  outcome.master = slots_of(tiny, master_of);
  outcome.ema = slots_of(tiny, ema_of);
  return outcome;
}

ZeroOutcome outcome_of(const TinyOptions& options, int64_t num_steps, int64_t global_batch = kDividedBatch) {
  return outcome_of(TinyTraining(options), num_steps, global_batch);
}

// Trains in each of these ways on ranks of one group. Every rank comes to what is returned.
std::vector<ZeroOutcome> train_on_ranks(int64_t world_size, const std::vector<TinyOptions>& ways,
                                        int64_t num_steps) {
  std::vector<ZeroOutcome> outcomes(ways.size());
  std::mutex mutex;
  test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
    for (size_t i = 0; i < ways.size(); ++i) {
      TinyOptions ranked = ways[i];
      ranked.group = group;
      const ZeroOutcome mine = outcome_of(ranked, num_steps);
      const std::lock_guard lock(mutex);
      ZeroOutcome& first = outcomes[i];
      if (first.losses.empty()) first = mine;
      EXPECT_EQ(mine.losses, first.losses);
      EXPECT_TRUE(at::equal(mine.master, first.master));
    }
  });
  return outcomes;
}

double relative_difference(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).norm() / b.norm()).item<double>();
}

// Where training state waits. On a CPU, `cpu` is memory like any other.
enum class Offload { kNone, kCpu, kNvme, kNvmeWithWeights };  // the last one at stage 3

// One way to train that has to give what one rank gives that does none of it.
struct Setting {
  int64_t world_size = 1, stage = 0;
  bool accumulate = false, recompute = false, has_skips = false;
  Offload offload = Offload::kNone;

  std::vector<int64_t> factors() const {
    return {world_size, stage, accumulate, recompute, has_skips, static_cast<int64_t>(offload)};
  }
};

std::vector<Setting> every_setting() {
  std::vector<Setting> settings;
  for (int64_t world_size = 1; world_size <= 4; ++world_size)
    for (int64_t stage = 0; stage <= 3; ++stage)
      for (int combination = 0; combination < 8; ++combination)
        for (const Offload offload :
             {Offload::kNone, Offload::kCpu, Offload::kNvme, Offload::kNvmeWithWeights})
          if (stage == 3 || offload != Offload::kNvmeWithWeights)
            settings.push_back({world_size, stage, (combination & 1) != 0, (combination & 2) != 0,
                                (combination & 4) != 0, offload});
  return settings;
}

// Every (ranks, stage), and at stage 3 once more with the weights on NVMe: those of the `dtype`-th dtype. The
// rest takes turns so that over all dtypes each pair of values occurs.
std::vector<Setting> covering_settings(int64_t dtype) {
  std::vector<Setting> settings;
  for (int64_t world_size = 1; world_size <= 4; ++world_size)
    for (int64_t stage = 0; stage <= 3; ++stage) {
      if ((world_size + stage) % 3 == dtype)
        settings.push_back({world_size, stage, (world_size + stage / 2) % 2 == 0,
                            (world_size + stage) % 2 == 1, (world_size + world_size / 2 + stage / 2) % 2 == 1,
                            static_cast<Offload>((world_size + 2 * stage) % 3)});
      if (stage == 3 && (world_size + 2) % 3 == dtype)
        settings.push_back({world_size, stage, (world_size + world_size / 2) % 2 == 0, world_size % 2 == 0,
                            (world_size + world_size / 2) % 2 == 1, Offload::kNvmeWithWeights});
    }
  return settings;
}

TEST(Settings, CoverEveryPairOfValues) {
  using Pairs = std::set<std::tuple<size_t, int64_t, size_t, int64_t>>;
  const auto add_pairs = [](const Setting& setting, int64_t dtype, Pairs& pairs) {
    std::vector<int64_t> factors = setting.factors();
    factors.push_back(dtype);
    for (size_t i = 0; i < factors.size(); ++i)
      for (size_t j = i + 1; j < factors.size(); ++j) pairs.insert({i, factors[i], j, factors[j]});
  };
  Pairs covered, all;
  for (int64_t dtype = 0; dtype < 3; ++dtype) {
    for (const Setting& setting : covering_settings(dtype)) add_pairs(setting, dtype, covered);
    for (const Setting& setting : every_setting()) add_pairs(setting, dtype, all);
  }
  EXPECT_EQ(covered, all);
}

TinyOptions options_of(const Setting& setting, at::ScalarType dtype) {
  TinyOptions options{.compute_dtype = dtype, .max_grad_norm = 0.5, .objective = "epsilon"};
  options.has_skips = setting.has_skips;
  // Four micro-steps: of 4, 2 and 1 images; three of 2 on three ranks. The last one is smaller somewhere.
  const int64_t most_rows = (kMatrixBatch + setting.world_size - 1) / setting.world_size;
  options.micro_batch = setting.accumulate ? (most_rows + 3) / 4 : 0;
  options.accumulate_f32 = setting.accumulate;
  options.zero = {.stage = setting.stage, .prefetch_segments = setting.world_size - 1};
  const MemoryChoice choice{.activations = setting.recompute ? Activations::kRecompute : Activations::kKeep};
  options.memory.assign(setting.has_skips ? test::SkipModel::kNumSegments : 4, choice);
  const Placement state = setting.offload == Offload::kNone  ? Placement::kDevice
                          : setting.offload == Offload::kCpu ? Placement::kHost
                                                             : Placement::kNvme;
  return test::placed(options, state,
                      setting.offload == Offload::kNvmeWithWeights ? Placement::kNvme : Placement::kDevice);
}

struct Differences {
  int64_t num_runs = 0;
  double losses = 0, master = 0, ema = 0;

  void add(const ZeroOutcome& outcome, const ZeroOutcome& expected) {
    losses = std::max(losses, worst_relative(outcome.losses, expected.losses));
    master = std::max(master, relative_difference(outcome.master, expected.master));
    ema = std::max(ema, relative_difference(outcome.ema, expected.ema));
  }
  void print(const char* name) const {
    printf("%s, %ld runs: worst relative difference: losses %.1e, weights %.1e, EMA %.1e\n", name, num_runs,
           losses, master, ema);
  }
};

class Stages : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(Stages, TrainWhatOneRankTrains) {
  const at::ScalarType dtype = GetParam();
  const bool exact = dtype == at::kFloat, full = std::getenv("KILN_FULL") != nullptr;
  const int64_t num_steps = full ? 30 : exact ? 10 : 15;  // in f32 what differs shows at once
  const std::vector<Setting> settings = full ? every_setting()
                                             : covering_settings(exact                    ? 0
                                                                 : dtype == at::kBFloat16 ? 1
                                                                                          : 2);
  const ZeroOutcome expected[] = {
      outcome_of(options_of({.has_skips = false}, dtype), num_steps, kMatrixBatch),
      outcome_of(options_of({.has_skips = true}, dtype), num_steps, kMatrixBatch)};
  Differences alone, together;  // one rank: only by the order in which micro-batches add up
  std::mutex mutex;
  for (int64_t world_size = 1; world_size <= 4; ++world_size) {
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (const Setting& setting : settings) {
        if (setting.world_size != world_size) continue;
        TinyOptions options = options_of(setting, dtype);
        options.group = group;
        const ZeroOutcome outcome = outcome_of(options, num_steps, kMatrixBatch);
        const std::lock_guard lock(mutex);
        Differences& worst = world_size == 1 ? alone : together;
        worst.add(outcome, expected[setting.has_skips]);
        worst.num_runs += group->rank() == 0;
      }
    });
  }
  alone.print(fmt::format("{} on one rank", c10::toString(dtype)).c_str());
  together.print(fmt::format("{} on 2 to 4", c10::toString(dtype)).c_str());
  EXPECT_EQ(alone.num_runs + together.num_runs, static_cast<int64_t>(settings.size()));
  // A few times what all settings give (benchmarks/results/ranks-matrix_*): other orders of the sums, which
  // one rank's micro-batches make, too.
  const double losses = exact                    ? 5e-6
                        : dtype == at::kBFloat16 ? 2e-3
                                                 : 2e-4,
               weights = exact                    ? 5e-6
                         : dtype == at::kBFloat16 ? 1.5e-2
                                                  : 4e-3;
  for (const Differences& worst : {alone, together}) {
    EXPECT_LE(worst.losses, losses);
    EXPECT_LE(worst.master, weights);
    EXPECT_LE(worst.ema, weights);
  }
}

INSTANTIATE_TEST_SUITE_P(ComputeDtypes, Stages, ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf));

// Views that autograd saved must see gathered weights, and gradients must not become zero.
TEST(Zero, StageThreeWithKeptActivationsIsPlainTrainingBitwise) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const ZeroOutcome plain = outcome_of({.compute_dtype = dtype}, 5);
    const ZeroOutcome divided = outcome_of({.compute_dtype = dtype, .zero = {.stage = 3}}, 5);
    EXPECT_EQ(plain.losses, divided.losses);
    EXPECT_TRUE(at::equal(plain.master, divided.master));
    EXPECT_TRUE(at::equal(plain.ema, divided.ema));
  }
}

// A sum of two is the same in any order: stages differ in nothing but where state lies.
TEST(Zero, StagesOfTwoRanksAgreeBitwise) {
  std::vector<TinyOptions> ways;
  for (int64_t stage = 0; stage <= 3; ++stage) ways.push_back({.zero = {.stage = stage}});
  const std::vector<ZeroOutcome> outcomes = train_on_ranks(2, ways, 5);
  for (size_t stage = 1; stage <= 3; ++stage) {
    EXPECT_EQ(outcomes[0].losses, outcomes[stage].losses) << stage;
    EXPECT_TRUE(at::equal(outcomes[0].master, outcomes[stage].master)) << stage;
  }
}

// A sum of two is the same in any pieces.
TEST(Zero, ReducesInBuckets) {
  std::vector<TinyOptions> ways(1);  // the first one in whole units
  for (int64_t stage = 0; stage <= 3; ++stage) {
    TinyOptions options;
    options.zero = {.stage = stage, .reduce_bucket_size = 4000};  // two pieces of the smallest unit
    if (stage > 1) options.micro_batch = 2;  // what several reductions of a segment add up to
    ways.push_back(options);
  }
  const std::vector<ZeroOutcome> outcomes = train_on_ranks(2, ways, 3);
  for (size_t stage = 0; stage <= 3; ++stage)
    EXPECT_LE(worst_relative(outcomes[stage + 1].losses, outcomes[0].losses), stage > 1 ? 5e-6 : 0) << stage;
}

TEST(Zero, ReducesInTheDtypeAskedFor) {
  const TinyOptions bf16{.compute_dtype = at::kBFloat16};
  const ZeroOutcome expected = outcome_of(bf16, 3);
  std::vector<TinyOptions> ways(4, bf16);
  for (int64_t stage = 0; stage <= 3; ++stage)
    ways[static_cast<size_t>(stage)].zero = {.stage = stage, .reduce_dtype = at::kFloat};
  const std::vector<ZeroOutcome> outcomes = train_on_ranks(3, ways, 3);
  for (size_t stage = 0; stage <= 3; ++stage)
    EXPECT_LE(worst_relative(outcomes[stage].losses, expected.losses), 5e-3) << stage;
}

// Two machines of two ranks: each holds all of the state, divided in two.
TEST(Zero, ShardsMayBeDividedWithinANodeOnly) {
  const TinyOptions plain{.max_grad_norm = 0.5};
  const ZeroOutcome expected = outcome_of(plain, 5);
  test::on_nodes({2, 2}, [&](const std::shared_ptr<ProcessGroup>& group) {
    for (int64_t stage = 1; stage <= 3; ++stage) {
      TinyOptions options = plain;
      options.group = group;
      options.micro_batch = 1;
      options.zero = {.stage = stage, .shard_within_node = true};
      const TinyTraining tiny(options);
      EXPECT_EQ(tiny.state->segments[1].unit.sharding().world_size, 2);
      EXPECT_EQ(tiny.state->segments[1].unit.sharding().rank, group->rank() % 2);
      const ZeroOutcome outcome = outcome_of(tiny, 5, kDividedBatch);
      EXPECT_LE(worst_relative(outcome.losses, expected.losses), 5e-6) << stage;
      EXPECT_LE(relative_difference(outcome.master, expected.master), 1e-4) << stage;
    }
  });
}

// --- bytes and elements ---

// Memory behind tensors, shared storages once.
int64_t live_bytes(const std::vector<at::Tensor>& tensors) {
  std::set<const void*> seen;
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    const c10::Storage& storage = tensor.storage();
    if (storage.data() && seen.insert(storage.data()).second) bytes += static_cast<int64_t>(storage.nbytes());
  }
  return bytes;
}

TEST(Zero, HoldsWhatTheFormulaSays) {
  printf("bytes per rank: ranks stage dtype      weights  gradients     master    moments        EMA\n");
  for (int64_t world_size : {1, 2, 3, 4}) {
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        for (int64_t stage = 0; stage <= 3; ++stage) {
          const TinyTraining tiny({.compute_dtype = dtype, .group = group, .zero = {.stage = stage}});
          tiny.step->run(rows_of(tiny.batch(kDividedBatch), *group), 1e-3);
          std::vector<at::Tensor> weights, grads, master, moments, emas;
          int64_t whole = 0, shard = 0;  // elements, padded so that ranks divide them
          for (auto& segment : tiny.state->segments) {
            FlatUnit& unit = segment.unit;
            weights.insert(weights.end(), {unit.compute_weights, unit.weight_shard});
            grads.insert(grads.end(), {unit.grads, unit.grad_shard});
            master.push_back(unit.master);
            for (const auto& moment : unit.moments) moments.push_back(moment);
            emas.push_back(unit.emas[0]);
            const int64_t divisor = stage == 0 ? 32 : 32 * world_size;
            const int64_t padded = (unit.layout().size + divisor - 1) / divisor * divisor;
            whole += padded;
            shard += stage == 0 ? padded : padded / world_size;
          }
          const auto element = static_cast<int64_t>(c10::elementSize(dtype));
          EXPECT_EQ(live_bytes(weights), (stage == 3 ? shard : whole) * element);
          EXPECT_EQ(live_bytes(grads), (stage >= 2 ? shard : whole) * element);
          EXPECT_EQ(live_bytes(moments), 8 * shard);
          EXPECT_EQ(live_bytes(emas), 4 * shard);
          if (dtype != at::kFloat) {  // in f32 part of the weights
            EXPECT_EQ(live_bytes(master), 4 * shard);
          }
          if (group->rank() == 0)
            printf("                %5ld %5ld %-8s %10ld %10ld %10ld %10ld %10ld\n", world_size, stage,
                   c10::toString(dtype), live_bytes(weights), live_bytes(grads),
                   dtype == at::kFloat ? 0 : live_bytes(master), live_bytes(moments), live_bytes(emas));
        }
      }
    });
  }
}

// How many segments have whole weights in memory, at every phase of a step.
class WholeSegments : public StepObserver {
 public:
  explicit WholeSegments(const TrainingState& state) : state_(state) {}
  void begin(StepPhase, int64_t) override { look(); }
  void end(StepPhase, int64_t) override { look(); }
  int64_t most = 0;

 private:
  void look() {
    int64_t whole = 0;
    for (const auto& segment : state_.segments)
      whole += segment.unit.compute_weights.storage().data() != nullptr;
    most = std::max(most, whole);
  }
  const TrainingState& state_;
};

TEST(Zero, KeepsNoMoreSegmentsWholeThanAsked) {
  test::on_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
    for (const int64_t prefetch : {0, 1}) {
      const TinyTraining tiny({.group = group, .zero = {.stage = 3, .prefetch_segments = prefetch}});
      WholeSegments observer(*tiny.state);
      tiny.step->observe(&observer);
      tiny.step->run(rows_of(tiny.batch(kDividedBatch), *group), 1e-3);
      EXPECT_EQ(observer.most, 1 + prefetch);
    }
  });
}

// A step's elements: 2 P at stages 0 and 1, whatever the accumulation; stage 2 adds a reduction per
// micro-step; stage 3 gathers twice and reduces once per micro-step, less the last segment's second gather.
TEST(Zero, SendsNoMoreThanTheFormulaSays) {
  test::on_ranks(3, [&](const std::shared_ptr<ProcessGroup>& group) {
    for (const int64_t micro_steps : {1, 3})
      for (int64_t stage = 0; stage <= 3; ++stage) {
        const TinyTraining tiny({.accumulate_f32 = true,
                                 .micro_batch = 3 / micro_steps,
                                 .group = group,
                                 .zero = {.stage = stage}});
        int64_t whole = 0;
        for (const auto& segment : tiny.state->segments) whole += segment.unit.size();
        const int64_t last = tiny.state->segments.back().unit.size();
        const CommunicationVolume before = group->volume();
        tiny.step->run(rows_of(tiny.batch(kDividedBatch), *group), 1e-3);
        const CommunicationVolume& after = group->volume();
        EXPECT_EQ(after.all_reduced - before.all_reduced, stage == 0 ? whole : 0);
        EXPECT_EQ(after.reduce_scattered - before.reduce_scattered, stage == 0   ? 0
                                                                    : stage == 1 ? whole
                                                                                 : micro_steps * whole);
        EXPECT_EQ(after.all_gathered - before.all_gathered, stage == 0   ? 0
                                                            : stage == 3 ? micro_steps * (2 * whole - last)
                                                                         : whole);
      }
  });
}

TEST(Zero, SmallUnitsMayStayWhole) {
  test::on_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
    const TinyTraining tiny({.group = group, .zero = {.stage = 3, .persist_threshold = int64_t{1} << 40}});
    tiny.step->run(rows_of(tiny.batch(kDividedBatch), *group), 1e-3);
    for (const auto& segment : tiny.state->segments) {
      EXPECT_EQ(segment.unit.sharding().zero_stage, 2);
      EXPECT_NE(segment.unit.compute_weights.storage().data(), nullptr);
    }
  });
}

// --- decisions that all ranks take alike ---

TEST(Zero, SignalsReachAllRanks) {
  for (const int64_t world_size : {1, 3}) {
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      const TinyTraining tiny({.group = group});
      const StepBatch batch = rows_of(tiny.batch(kDividedBatch), *group);
      const double clock = static_cast<double>(group->rank() + 1);
      const bool is_last = group->rank() == world_size - 1;
      const int64_t asked = group->rank() == 0 ? 5 : 2;
      const StepResult result =
          tiny.step->run(batch, 1e-3, {.stop = is_last, .clock_seconds = clock, .requests = asked});
      EXPECT_TRUE(result.signals.stop);
      EXPECT_EQ(result.signals.requests, 5) << "rank 0's";
      EXPECT_EQ(result.signals.clock_seconds, 1) << "rank 0's";
      EXPECT_GT(result.grad_norm, 0);
      EXPECT_FALSE(tiny.step->run(batch, 1e-3).signals.stop);
    });
  }
}

TEST(Zero, ANonFiniteRowOfOneRankMovesNothingAnywhere) {
  test::on_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
    for (int64_t stage = 0; stage <= 3; ++stage) {
      const TinyTraining tiny({.group = group, .zero = {.stage = stage}});
      const at::Tensor before = slots_of(tiny, master_of);
      StepBatch batch = tiny.batch(kDividedBatch);
      batch.x_0.select(0, 8).fill_(std::numeric_limits<float>::quiet_NaN());  // the last rank's
      const StepResult result = tiny.step->run(rows_of(batch, *group), 1e-3);
      EXPECT_FALSE(result.applied);
      EXPECT_TRUE(std::isfinite(result.losses[0]));
      EXPECT_FALSE(std::isfinite(result.losses[8]));
      EXPECT_TRUE(at::equal(slots_of(tiny, master_of), before));
      EXPECT_TRUE(tiny.step->run(rows_of(tiny.batch(kDividedBatch), *group), 1e-3).applied);
    }
  });
}

TEST(Zero, AnOverflowShrinksEveryRanksLossScale) {
  test::on_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
    const TinyTraining tiny({.compute_dtype = at::kHalf, .group = group, .zero = {.stage = 2}});
    tiny.state->loss_scaler.restore(1e12, 0, 0);
    EXPECT_FALSE(tiny.step->run(rows_of(tiny.batch(kDividedBatch), *group), 1e-3).applied);
    EXPECT_EQ(tiny.state->loss_scaler.scale(), 5e11);
    EXPECT_EQ(tiny.state->updates, 0);
  });
}

}  // namespace
}  // namespace kiln
