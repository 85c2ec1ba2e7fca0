// A dry run of one training step: the real model, state and step of src/train on meta tensors, with every
// allocation and every operation recorded. Nothing is computed and no memory is used.
#pragma once
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/dry_run.h"
#include "plan/op_recorder.h"
#include "train/memory_recorder.h"
#include "train/setup.h"

namespace kiln {

// A collective begins, or what a rank does next waits for one that has begun.
struct CollectiveEvent {
  size_t before_op = 0;  // of the trace
  int64_t number = 0;    // of the collective
  bool begins = false;
  CollectiveObserver::Operation operation{};  // where it begins
  int64_t bytes = 0;                          // there: of the whole tensor
  int64_t num_ranks = 1;                      // there: that take part
  bool on_one_machine = true;                 // there: all of them
};

// Records the collectives of a dry run's group.
class CollectiveLog : public CollectiveObserver {
 public:
  // `position`: how many operations there are so far.
  explicit CollectiveLog(std::function<size_t()> position) : position_(std::move(position)) {}
  void started(const Start& start) override {
    events.push_back({.before_op = position_(),
                      .number = start.number,
                      .begins = true,
                      .operation = start.operation,
                      .bytes = start.bytes,
                      .num_ranks = start.num_ranks,
                      .on_one_machine = start.on_one_machine});
  }
  void waited(int64_t number) override { events.push_back({position_(), number}); }
  std::vector<CollectiveEvent> events;

 private:
  std::function<size_t()> position_;
};

struct StepTrace {
  DryRunDevice device = DryRunDevice::kNone;
  std::vector<std::string> segments;     // names, as Denoiser::segments()
  std::vector<int64_t> segment_weights;  // trainable elements of each unit, padding included
  int64_t num_weights = 0;               // trainable, padding not included
  double flops_per_image = 0;            // forward and backward, nothing recomputed: what share of peak is of
  int64_t load_peak_bytes = 0;           // the most while model and state are made
  StepMemory memory;                     // of the steady step (the first one allocates the same)
  std::vector<OpRecord> ops;
  // Of several ranks this is the trace of one that has the most rows of a batch.
  int64_t world_size = 1, ranks_per_node = 0;  // 0: all on one
  ZeroOptions zero;
  FlatUnitOptions unit;                      // of every unit; its sharding is left out
  OffloadedBytes offloaded;                  // of the optimizer
  int64_t offloaded_activation_bytes = 0;    // on the host
  std::vector<CollectiveEvent> collectives;  // those that begin while the state is made come first
};

// One whole step of one of `world_size` ranks, so many on each machine (0: all on one); options.global_batch
// is of all of them. Of many equal micro-steps one is traced and its operations count as often
// (OpRecord::times); the peak is that of all. Throws Error for options that cannot be trained.
StepTrace trace_step(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                     int64_t world_size = 1, int64_t ranks_per_node = 0);
// The same with every micro-step traced.
StepTrace trace_every_micro_step(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                                 int64_t world_size = 1, int64_t ranks_per_node = 0);

// Operations [first, last) of the second of a trace's micro-steps; of three or more.
std::pair<size_t, size_t> second_micro_step(const std::vector<OpRecord>& ops);

// The ranks that a dry run stands for, so many on each machine (0: all on one).
std::shared_ptr<ProcessGroup> dry_group(int64_t world_size, int64_t ranks_per_node = 0);

}  // namespace kiln
