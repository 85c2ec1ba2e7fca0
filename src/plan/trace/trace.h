// A dry run of one training step: the real model, state and step on meta tensors, with every allocation and
// every operation recorded. Nothing is computed and no memory is used.
#pragma once
#include <string>
#include <vector>

#include "core/dry_run.h"
#include "step/span.h"
#include "step/step_batch.h"
#include "train/setup.h"

namespace kiln {

// The steady step of one rank; the first step allocates the same. Of several ranks it is one with the most
// rows of a batch.
struct StepTrace : RecordedStep {
  DryRunDevice device = DryRunDevice::kNone;
  TrainOptions options;  // global_batch is of all ranks
  DataShape data;
  int64_t world_size = 1;
  int64_t ranks_per_node = 0;            // 0: all on one
  std::vector<std::string> segments;     // names, as Denoiser::segments()
  std::vector<FlatLayout> layouts;       // the trainable weights of each segment, then of the loss's head
  std::vector<int64_t> segment_weights;  // trainable elements of each unit, padding included
  int64_t num_weights = 0;               // of the model, trainable, padding not included
  int64_t num_base_weights = 0;          // that an adapter changes
  // Counts forward and backward of an image of largest_extent(data), with nothing recomputed. Shares of peak
  // count these.
  double flops_per_image = 0;
  int64_t offloaded_activation_bytes = 0;  // on the host
  // These describe the training state.
  ZeroOptions zero;
  FlatUnitOptions unit;     // options of every unit, without its sharding and moments
  int64_t state_bytes = 0;  // optimizer's state that this rank keeps: master, moments, EMAs
  OffloadedBytes offloaded;
  int64_t checkpoint_bytes = 0;       // all files of a checkpoint
  int64_t checkpoint_part_bytes = 0;  // the part that this rank writes
};
// Fills in what a trace says of the training state, and of its checkpoints. Laying out the files of a
// checkpoint takes as long as making the state.
void describe_state(const TrainingState& state, StepTrace& trace);
void describe_checkpoint(const TrainingState& state, StepTrace& trace);

int64_t num_micro_steps(const StepTrace& trace);
// True if the update runs beside the next step's forward.
bool updates_beside(const StepTrace& trace);

// Traces one whole step of one of `world_size` ranks, `ranks_per_node` of them on each machine (0: all on
// one). options.global_batch is that of all ranks. If there are many equal micro-steps, one stands for all
// between the others (Span::times); the peak is that of all. Throws Error for options that cannot be trained.
StepTrace trace_step(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                     int64_t world_size = 1, int64_t ranks_per_node = 0);
// Does the same with every micro-step traced.
StepTrace trace_every_micro_step(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                                 int64_t world_size = 1, int64_t ranks_per_node = 0);

// Returns a batch of the largest lane with captions that are all as long as possible, which takes the most
// memory. It has what `options` draw.
BatchTensors dry_batch(const BatchOptions& options, const DataShape& data, int64_t rows,
                       const ArrayMaker& make);

// Returns an array of a batch without values, on meta or without memory on the host, from where it can be
// copied to meta. Reading it throws an error; that of its memory names it.
at::Tensor array_without_values(const std::string& name, at::IntArrayRef shape, at::ScalarType dtype,
                                at::Device device);

// Returns the ranks that a dry run stands for, `ranks_per_node` on each machine (0: all on one).
std::shared_ptr<ProcessGroup> dry_group(int64_t world_size, int64_t ranks_per_node = 0);

}  // namespace kiln
