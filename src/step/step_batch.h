// What a step is given: a global batch, or a rank's rows of one, as tensors.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "data/loader/batch.h"
#include "diffusion/objective.h"
#include "models/conditioning.h"

namespace kiln {

// On the CPU, timesteps already mapped by the objective.
struct StepBatch {
  at::Tensor x_0, noise;     // (B, C, H, W) f32
  at::Tensor timesteps;      // (B) what Objective::timesteps gives
  at::Tensor input_noise{};  // the noise that x_t has, in the place of `noise`; undefined: the same
  Conditioning conditioning{};
  int64_t first_position = 0;  // of the first row in the stream of samples
  int64_t first_row = 0;       // of this rank's rows in the global batch
  int64_t global_batch = 0;    // rows of all ranks; 0: the rows here are all

  int64_t size() const { return x_0.size(0); }
  int64_t global_size() const { return global_batch > 0 ? global_batch : size(); }
};
// The tensors of a batch of this shape, each made by `make`. Timesteps are the objective's to compute from
// `time_uniform`; host_offsets of captions are the caller's.
using ArrayMaker = std::function<at::Tensor(BatchArray array, at::IntArrayRef sizes, at::ScalarType dtype)>;
struct BatchTensors {
  StepBatch batch{};
  at::Tensor time_uniform{};  // (B) f64
};
BatchTensors batch_tensors(const BatchShape& shape, const ArrayMaker& make);

// Views on the loader's arrays: `batch` must outlive the result.
StepBatch as_tensors(const Batch& batch, const Objective& objective);

// Copies the batch to pinned memory, so that the host need not wait until the device has read it.
StepBatch pinned(StepBatch batch);

// Rows [first, first + size) of a batch, on `device`; a batch of their own.
StepBatch slice_rows(const StepBatch& batch, int64_t first, int64_t size, at::Device device);

// Timesteps of the samples at positions [first, first + count) of the global stream, (count), as the loaders
// of all ranks draw them.
at::Tensor timesteps_at(const Objective& objective, uint64_t seed, int64_t first, int64_t count);
// Where in the schedule they are, each in [0, 1].
std::vector<double> positions_at(const Objective& objective, uint64_t seed, int64_t first, int64_t count);

// One walk of a step: some rows of this rank, as part of a global batch.
struct MicroStep {
  StepBatch batch;  // on the device
  int64_t global_batch = 0;
  bool first = false, last = false;  // of the step
  bool is_filler = false;  // this rank has no rows left: it walks with the others, and counts for nothing
};
// How many walks of at most `micro_batch` images (0: all at once) a step takes: as many as the rank with the
// most rows needs, since all ranks take part in every collective of a walk.
int64_t num_micro_steps(const StepBatch& batch, int64_t micro_batch, int64_t world_size);
// Number `index` of `count`.
MicroStep micro_step(const StepBatch& batch, int64_t micro_batch, int64_t index, int64_t count,
                     at::Device device);

}  // namespace kiln
