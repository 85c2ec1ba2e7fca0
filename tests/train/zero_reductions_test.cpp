// What ZeRO sums, in which dtype and how often; on machines that hold copies, and where not all is divided
// alike.
#include <gmock/gmock.h>

#include <map>
#include <set>

#include "parallel/rank_threads.h"
#include "parallel/zero/zero.h"
#include "train/placements.h"

namespace kiln {
namespace {

using test::rows_of, test::TinyOptions, test::TinyTraining, test::worst_relative;

constexpr int64_t kReducedBatch = 9;

// bf16 values of all magnitudes whose sums over a few ranks are exact in f32, in any order.
at::Tensor gradients_of(int64_t rank, int64_t size) {
  at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(rank) + 1);
  const at::Tensor mantissas = at::randint(-127, 128, {size}, generator, at::kFloat);
  const at::Tensor scales = at::tensor({0.0625f, 0.25f, 1.0f, 4.0f, 16.0f});
  const at::Tensor drawn = at::randint(0, scales.numel(), {size}, generator, at::kLong);
  return (mantissas * scales.index_select(0, drawn)).to(at::kBFloat16);
}

// So many units of one weight each, which `zero` knows.
std::vector<FlatUnit> managed_units(Zero& zero, int64_t num_units, int64_t size,
                                    FlatUnitOptions options = {}) {
  FlatLayout layout;
  layout.add("weight", {size});
  options.sharding = zero.sharding_of(size);
  std::vector<FlatUnit> units;
  for (int64_t i = 0; i < num_units; ++i) units.emplace_back(fmt::format("unit {}", i), layout, options);
  std::vector<FlatUnit*> managed;
  for (FlatUnit& unit : units) managed.push_back(&unit);
  zero.manage(managed);
  return units;
}

// --reduce-dtype f32 gives the sum that is rounded once; a sum in bf16 does not.
TEST(Reductions, InF32AreRoundedOnce) {
  constexpr int64_t kRanks = 4, kSize = 4096;
  test::on_ranks(kRanks, [&](const std::shared_ptr<ProcessGroup>& group) {
    for (int64_t stage = 0; stage <= 3; ++stage)
      for (const bool in_f32 : {true, false}) {
        Zero zero(group, {.stage = stage,
                          .reduce_bucket_size = 1000,
                          .reduce_dtype = in_f32 ? std::optional(at::kFloat) : std::nullopt});
        const std::vector<FlatUnit> units =
            managed_units(zero, 1, kSize, {.compute_dtype = at::kBFloat16, .grad_dtype = at::kBFloat16});
        const FlatUnit& unit = units[0];
        zero.gather(0, 1);
        zero.begin_gradients(0, /*first_micro_step=*/true);
        unit.grads.copy_(gradients_of(group->rank(), kSize));
        zero.reduce(0, /*first_micro_step=*/true, /*last_micro_step=*/true);
        zero.finish_reductions();
        at::Tensor sum = at::zeros({kSize});
        for (int64_t rank = 0; rank < kRanks; ++rank) sum += gradients_of(rank, kSize).to(at::kFloat);
        const at::Tensor expected = sum.to(at::kBFloat16).narrow(0, unit.shard_offset(), unit.shard_size());
        EXPECT_EQ(at::equal(unit.grad_shard, expected), in_f32) << "stage " << stage;
      }
  });
}

// One unit's gradients are made anew while those of the micro-step before are being summed.
TEST(Reductions, OfFewUnitsDoNotLoseTheirMemory) {
  constexpr int64_t kRanks = 2, kSize = 1 << 20, kMicroSteps = 4;
  const auto gradients = [](int64_t rank, int64_t micro_step) {  // small integers: their sums are exact
    return at::arange(kSize, at::kFloat).remainder(31) * static_cast<double>((rank + 1) * (micro_step + 1));
  };
  test::on_ranks(kRanks, [&](const std::shared_ptr<ProcessGroup>& group) {
    for (const int64_t num_units : {1, 2})
      for (const int64_t stage : {2, 3}) {
        Zero zero(group, {.stage = stage});
        std::vector<FlatUnit> units = managed_units(zero, num_units, kSize);
        for (int64_t micro_step = 0; micro_step < kMicroSteps; ++micro_step)
          for (size_t s = units.size(); s-- > 0;) {
            const bool first = micro_step == 0, last = micro_step == kMicroSteps - 1;
            EXPECT_FALSE(zero.begin_gradients(s, first));
            units[s].grads.copy_(gradients(group->rank(), micro_step));
            zero.reduce(s, first, last);
          }
        zero.finish_reductions();
        at::Tensor sum = at::zeros({kSize});
        for (int64_t rank = 0; rank < kRanks; ++rank)
          for (int64_t micro_step = 0; micro_step < kMicroSteps; ++micro_step)
            sum += gradients(rank, micro_step);
        for (const FlatUnit& unit : units)
          EXPECT_TRUE(at::equal(unit.grad_shard, sum.narrow(0, unit.shard_offset(), unit.shard_size())))
              << num_units << " units, stage " << stage;
      }
  });
}

// Uneven machines, of which one alone would find nothing wrong with its own number.
TEST(Reductions, UnevenNodesAreAnErrorOfEveryRank) {
  for (const std::vector<int64_t>& ranks_of_nodes : {std::vector<int64_t>{1, 2}, {2, 1, 1}, {1, 1, 2}}) {
    const std::vector<std::string> errors =
        test::errors_of_nodes(ranks_of_nodes, [](const std::shared_ptr<ProcessGroup>& group) {
          const Zero zero(group, {.stage = 2, .shard_within_node = true});
        });
    EXPECT_EQ(std::set(errors.begin(), errors.end()).size(), 1u);
    EXPECT_THAT(errors,
                ::testing::Each(::testing::HasSubstr("expects the same number of ranks on every machine")));
  }
}

// What crosses between machines is a shard of the gradients, once per step.
TEST(Reductions, MachinesExchangeGradientsOncePerStep) {
  test::on_nodes({2, 2}, [&](const std::shared_ptr<ProcessGroup>& group) {
    for (int64_t stage = 1; stage <= 3; ++stage) {
      const TinyTraining tiny({.accumulate_f32 = true,
                               .micro_batch = 1,
                               .group = group,
                               .zero = {.stage = stage, .shard_within_node = true}});
      int64_t shards = 0;
      for (const auto& segment : tiny.state->segments) shards += segment.unit.shard_size();
      const int64_t before = group->volume().all_reduced;
      tiny.step->run(rows_of(tiny.batch(kReducedBatch), *group), 1e-3);
      EXPECT_EQ(group->volume().all_reduced - before, shards) << stage;
    }
  });
}

// In bf16, from one micro-step on: the sums between machines are those of shards.
TEST(Reductions, OfMachinesWithAccumulationTrainWhatOneRankTrains) {
  TinyOptions options{.compute_dtype = at::kBFloat16, .accumulate_f32 = true, .micro_batch = 1};
  const test::Outcome expected = test::train(options, kReducedBatch, 5);
  test::on_nodes({2, 2}, [&](const std::shared_ptr<ProcessGroup>& group) {
    for (int64_t stage = 1; stage <= 3; ++stage) {
      TinyOptions divided = options;
      divided.group = group;
      divided.zero = {.stage = stage, .shard_within_node = true};
      EXPECT_LE(worst_relative(test::train(divided, kReducedBatch, 5).losses, expected.losses), 2e-3)
          << stage;
    }
  });
}

// Some units stay whole, others are divided.
TEST(Reductions, OfUnitsOfWhichSomePersistTrainWhatOneRankTrains) {
  const auto options_with = [](int64_t micro_batch) {
    return TinyOptions{.accumulate_f32 = micro_batch > 0, .micro_batch = micro_batch, .max_grad_norm = 0.5};
  };
  std::vector<int64_t> sizes;
  {
    const TinyTraining tiny(options_with(0));
    for (const auto& segment : tiny.state->segments) sizes.push_back(segment.unit.layout().size);
  }
  std::map<int64_t, test::Outcome> expected;  // by the micro-batch
  for (const int64_t micro_batch : {0, 1})
    expected[micro_batch] = test::train(options_with(micro_batch), kReducedBatch, 5);
  for (const int64_t world_size : {2, 3})
    test::on_ranks(world_size, [&](const std::shared_ptr<ProcessGroup>& group) {
      for (const auto& [micro_batch, wanted] : expected) {
        TinyOptions divided = options_with(micro_batch);
        divided.group = group;
        divided.zero = {.stage = 3, .persist_threshold = *std::ranges::max_element(sizes)};
        const TinyTraining tiny(divided);
        std::set<int64_t> stages;
        for (const auto& segment : tiny.state->segments) stages.insert(segment.unit.sharding().zero_stage);
        EXPECT_EQ(stages, (std::set<int64_t>{2, 3}));
        const test::Outcome outcome = test::take_steps(tiny, kReducedBatch, 0, 5);
        EXPECT_LE(worst_relative(outcome.losses, wanted.losses), 5e-6) << world_size;
      }
    });
}

// Gradients that overflow in one of several micro-steps: nothing on any disk moves, and training goes on as
// on one rank that keeps everything in memory.
TEST(Reductions, AnOverflowMovesNothingOnTheDisk) {
  const TinyOptions plain{.compute_dtype = at::kHalf, .accumulate_f32 = true, .micro_batch = 1};
  const auto train_over_an_overflow = [](const TinyTraining& tiny) {
    const auto before = test::state_of(tiny);
    tiny.state->loss_scaler.restore(1e12, 0, 0);
    const StepBatch batch = rows_of(tiny.batch(kReducedBatch), tiny.state->zero->group());
    EXPECT_FALSE(tiny.step->run(batch, 1e-3).applied);
    EXPECT_EQ(tiny.state->loss_scaler.scale(), 5e11);
    EXPECT_EQ(tiny.state->updates, 0);
    test::expect_equal(test::state_of(tiny), before);
    tiny.state->loss_scaler.restore(1024, 0, 0);
    const test::Outcome outcome = test::take_steps(tiny, kReducedBatch, 0, 4);
    EXPECT_EQ(tiny.state->updates, 4);
    return outcome.losses;
  };
  const std::vector<double> expected = train_over_an_overflow(TinyTraining(plain));
  test::on_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
    TinyOptions divided = test::placed(plain, Placement::kNvme, Placement::kNvme);
    divided.group = group;
    divided.zero = {.stage = 3};
    EXPECT_LE(worst_relative(train_over_an_overflow(TinyTraining(divided)), expected), 2e-4);
  });
}

// Machines exchange their sums while the segments before are being computed: nothing waits for the network
// before the end of the backward.
TEST(Reductions, BetweenMachinesEndBehindTheBackward) {
  class Log : public CollectiveObserver {
   public:
    void started(const Start& start) override {
      if (start.operation == Operation::kAllReduce) exchanges.push_back(start.number);
      lines.push_back(start.number);
    }
    void waited(int64_t number) override { lines.push_back(-number); }
    std::vector<int64_t> exchanges, lines;
  };
  constexpr int64_t kUnits = 6, kSize = 64;
  const auto group = std::make_shared<ProcessGroup>(
      Ranks{.world_size = 4, .local_world_size = 2});  // a dry run: two machines of two
  Log log;
  group->observe(&log);
  Zero zero(group, {.stage = 2, .shard_within_node = true});
  const std::vector<FlatUnit> units = managed_units(zero, kUnits, kSize, {.device = at::kMeta});
  for (size_t s = kUnits; s-- > 0;) {
    zero.gather(s, -1);
    zero.begin_gradients(s, /*first_micro_step=*/true);
    zero.reduce(s, /*first_micro_step=*/true, /*last_micro_step=*/true);
  }
  zero.finish_reductions();
  group->observe(nullptr);
  ASSERT_EQ(log.exchanges.size(), static_cast<size_t>(kUnits));
  const auto place = [&](int64_t number) { return std::ranges::find(log.lines, number) - log.lines.begin(); };
  for (const int64_t exchange : log.exchanges)
    EXPECT_GT(place(-exchange), place(log.exchanges.back())) << "all have begun before one is waited for";
}

}  // namespace
}  // namespace kiln
