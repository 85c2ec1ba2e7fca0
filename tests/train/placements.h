// Tiny trainings whose state is somewhere, and what they train.
#pragma once
#include <gtest/gtest.h>

#include "core/allocations.h"
#include "core/aten.h"
#include "core/dry_run.h"
#include "step/span_recorder.h"
#include "train/tiny_model.h"

namespace kiln::test {

inline TinyOptions placed(TinyOptions options, Placement state, Placement weights = Placement::kDevice) {
  options.offload.optimizer = state;
  options.offload.params = weights;
  options.offload.nvme = {.folder = ::testing::TempDir(), .queue_depth = 4, .block_bytes = 1 << 15};
  return options;
}

// What this rank holds of all segments together, and of the largest one, in elements.
struct ShardSizes {
  int64_t all = 0, largest = 0;
};
inline ShardSizes shard_sizes(const TinyTraining& tiny) {
  ShardSizes sizes;
  for (const auto& segment : tiny.state->segments) {
    sizes.all += segment.unit.shard_size();
    sizes.largest = std::max(sizes.largest, segment.unit.shard_size());
  }
  return sizes;
}
inline int64_t bytes_of(const std::vector<at::Tensor>& buffers) {
  int64_t bytes = 0;
  for (const at::Tensor& buffer : buffers) bytes += static_cast<int64_t>(buffer.nbytes());
  return bytes;
}

// What a tensor of so many bytes takes on a disk.
inline int64_t disk_bytes(int64_t bytes) {
  return (bytes + BlockStore::kAlignment - 1) / BlockStore::kAlignment * BlockStore::kAlignment;
}

// Memory that a training takes once it has taken a step.
inline int64_t live_bytes_of(const TinyOptions& options, int64_t batch) {
  const int64_t before = live_cpu_bytes().live;
  const TinyTraining tiny(options);
  tiny.step->run(tiny.batch(batch), 1e-3);
  return live_cpu_bytes().live - before;
}

// Everything that training moves, of this rank.
inline std::vector<at::Tensor> state_of(const TinyTraining& tiny) {
  std::vector<at::Tensor> state;
  for (const auto& segment : tiny.state->segments) {
    const StateLease lease = segment.unit.lease(Access::kRead);
    state.push_back(lease.master.clone());
    for (const at::Tensor& moment : lease.moments) state.push_back(moment.clone());
    for (const at::Tensor& ema : lease.emas) state.push_back(ema.clone());
    state.push_back(segment.unit.lease_weights(Access::kRead).shard.clone());
  }
  return state;
}

inline void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << "buffer " << i;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<at::Tensor> state;
};

// Steps [first, last), each on a batch of its own.
inline Outcome take_steps(const TinyTraining& tiny, int64_t global_batch, int64_t first, int64_t last) {
  Outcome outcome;
  for (int64_t step = first; step < last; ++step) {
    const StepBatch batch = tiny.batch(global_batch, static_cast<uint64_t>(step));
    outcome.losses.push_back(tiny.step->run(rows_of(batch, tiny.state->zero->group()), 1e-3).loss);
  }
  tiny.state->zero->finish_gathers();  // an update may still run beside
  outcome.state = state_of(tiny);
  return outcome;
}

inline Outcome train(const TinyOptions& options, int64_t global_batch, int64_t num_steps) {
  return take_steps(TinyTraining(options), global_batch, 0, num_steps);
}

// Memory of a step on meta tensors, as on `device`.
inline StepMemory dry_run(DryRunDevice device, const TinyOptions& options, OffloadedBytes& offloaded) {
  constexpr int64_t kGlobalBatch = 4;
  const DryRunScope dry_run(device);
  TinyOptions meta = options;
  meta.device = at::kMeta;
  SpanRecorder memory;
  const MetaAllocationScope scope(memory);
  const TinyTraining tiny(meta);
  memory.finish();  // of the making of the state
  memory.register_state(*tiny.state);
  tiny.step->observe(&memory);
  const auto as_meta = [](const at::Tensor& tensor) {
    return at::empty_like(tensor, tensor.options().device(at::kMeta));
  };
  const StepBatch batch = tiny.batch(kGlobalBatch);
  tiny.step->run({.x_0 = as_meta(batch.x_0),
                  .noise = as_meta(batch.noise),
                  .timesteps = as_meta(batch.timesteps),
                  .conditioning = {.class_labels = as_meta(batch.conditioning.class_labels)}},
                 1e-3);
  offloaded = tiny.state->offloaded;
  return memory.finish().memory;
}

}  // namespace kiln::test
