// What the plan says of one of several ranks against the same run on real ranks.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <numeric>

#include <mutex>

#include "core/allocations.h"
#include "core/aten.h"
#include "data/loader/batches.h"
#include "parallel/rank_threads.h"
#include "plan/trace/trace.h"
#include "run/option_values.h"
#include "step/span_recorder.h"
#include "train/usable_options.h"

namespace kiln {
namespace {

struct Measured {
  std::map<MemoryKind, int64_t> persistent;
  CommunicationVolume volume;
};

StepBatch rows_of_rank(const TrainOptions& options, const DataShape& data, const Objective& objective,
                       const ProcessGroup& group) {
  const RowRange rows = rank_rows(options.global_batch, group.rank(), group.world_size());
  const std::vector<int64_t> shape{rows.count, data.channels, data.largest().height, data.largest().width};
  at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(group.rank()));
  return {.x_0 = at::randn(shape, generator),
          .noise = at::randn(shape, generator),
          .timesteps = objective.timesteps(at::full({rows.count}, 0.5, at::kDouble)),
          .conditioning = {.class_labels = at::ones({rows.count}, at::kLong)},
          .first_row = rows.first,
          .global_batch = options.global_batch};
}

// Trains one step and returns what each rank of these machines measured.
std::vector<Measured> train_on_nodes(const TrainOptions& options,
                                     const std::vector<int64_t>& ranks_of_nodes) {
  const DataShape data = synthetic_shape(options);
  std::vector<Measured> ranks(
      static_cast<size_t>(std::accumulate(ranks_of_nodes.begin(), ranks_of_nodes.end(), int64_t{0})));
  const auto train = [&](const std::shared_ptr<ProcessGroup>& group) {
    const Training training = build_training(options, data, at::kCPU, group);
    const StepBatch batch = rows_of_rank(options, data, *training.objective, *group);
    EXPECT_TRUE(training.step->run(batch, options.lr.peak).applied);
    for (size_t s = 0; s < training.state->segments.size(); ++s) training.state->zero->gather(s, 1);
    for (size_t s = 0; s < training.state->segments.size(); ++s) training.state->zero->release(s);
    SpanRecorder memory;
    memory.register_state(*training.state);
    ranks[static_cast<size_t>(group->rank())] = {.persistent = memory.finish().memory.persistent,
                                                 .volume = group->volume()};
  };
  test::on_nodes(ranks_of_nodes, train);
  return ranks;
}

std::vector<CollectiveObserver::Start> begun(const StepTrace& trace) {
  std::vector<CollectiveObserver::Start> begun;
  const auto add = [&](const std::vector<CollectiveEvent>& events) {
    for (const CollectiveEvent& event : events)
      if (event.begins) begun.push_back(event.start);
  };
  add(trace.under_way);
  for (const Span& span : trace.spans) add(span.collectives);
  return begun;
}

int64_t bytes_of(const StepTrace& trace, CollectiveObserver::Operation operation) {
  int64_t bytes = 0;
  for (const CollectiveObserver::Start& start : begun(trace))
    if (start.operation == operation) bytes += start.bytes;
  return bytes;
}

class PlannedRank : public ::testing::TestWithParam<int64_t> {
 protected:
  static void SetUpTestSuite() {
    install_tracking_cpu_allocator();
    at::set_num_threads(1);
  }
};

TEST_P(PlannedRank, HoldsAndSendsWhatARealOneDoes) {
  const int64_t stage = GetParam();
  for (const char* dtype : {"f32", "bf16"})
    for (int64_t world_size : {2, 3, 4}) {
      TrainOptions options = test::tiny_dit_options();
      options.global_batch = 2 * world_size;
      set_option(options, "compute-dtype", dtype);
      options.zero.stage = stage;
      options.objective.align_weight = world_size == 3 ? 0.5 : 0;  // a loss's head is divided as segments are
      const StepTrace trace = trace_step(options, synthetic_shape(options), DryRunDevice::kCpu, world_size);
      for (const Measured& rank : train_on_nodes(options, {world_size})) {
        EXPECT_EQ(trace.memory.persistent, rank.persistent) << dtype << " on " << world_size;
        using enum CollectiveObserver::Operation;
        const auto element_bytes = static_cast<int64_t>(c10::elementSize(trace.unit.compute_dtype));
        EXPECT_EQ(bytes_of(trace, kAllReduce), rank.volume.all_reduced * element_bytes);
        EXPECT_EQ(bytes_of(trace, kReduceScatter), rank.volume.reduce_scattered * element_bytes);
        // At stage 3 the test itself has gathered every unit once more.
        int64_t again = 0;
        for (const int64_t weights : trace.segment_weights)
          if (stage == 3)
            again += world_size * shard_elements(weights, {.zero_stage = stage, .world_size = world_size});
        EXPECT_EQ(bytes_of(trace, kAllGather), (rank.volume.all_gathered - again) * element_bytes);
      }
    }
}

INSTANTIATE_TEST_SUITE_P(Stages, PlannedRank, ::testing::Values(0, 1, 2, 3));

// Two machines of two ranks: divided among the ranks of one, and reduced shards go between them.
void expect_real_volume_where_machines_hold_copies(int64_t stage) {
  TrainOptions options = test::tiny_dit_options();
  options.global_batch = 8;
  options.micro_batch = 1;
  options.zero.stage = stage;
  options.zero.shard_within_node = true;
  const StepTrace trace =
      trace_step(options, synthetic_shape(options), DryRunDevice::kCpu, 4, /*ranks_per_node=*/2);
  int64_t whole = 0;  // elements
  for (const int64_t weights : trace.segment_weights)
    whole += 2 * shard_elements(weights, {.zero_stage = stage, .world_size = 2});
  using enum CollectiveObserver::Operation;
  for (const CollectiveObserver::Start& start : begun(trace)) {
    EXPECT_EQ(start.num_ranks, 2);
    EXPECT_EQ(start.on_one_machine, start.operation != kAllReduce);
  }
  EXPECT_EQ(bytes_of(trace, kAllReduce), 4 * whole / 2);  // once, whatever the micro-steps
  for (const Measured& rank : train_on_nodes(options, {2, 2})) {
    EXPECT_EQ(trace.memory.persistent, rank.persistent);
    EXPECT_EQ(bytes_of(trace, kAllReduce), 4 * rank.volume.all_reduced);
    EXPECT_EQ(bytes_of(trace, kReduceScatter), 4 * rank.volume.reduce_scattered);
    const int64_t again = stage == 3 ? whole : 0;  // gathered by the test
    EXPECT_EQ(bytes_of(trace, kAllGather), 4 * (rank.volume.all_gathered - again));
  }
}

TEST(PlannedRankOfMachines, SendsWhatARealOneDoesWhereMachinesHoldCopies) {
  install_tracking_cpu_allocator();
  at::set_num_threads(1);
  for (int64_t stage = 1; stage <= 3; ++stage) expect_real_volume_where_machines_hold_copies(stage);
}

}  // namespace
}  // namespace kiln
