// The input of a step: a global batch, or a rank's rows of one, as tensors.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "data/loader/batch.h"
#include "models/conditioning.h"

namespace kiln {

class Objective;

// On the CPU, with timesteps already mapped by the objective.
struct StepBatch {
  at::Tensor x_0, noise;     // (B, C, H, W) f32
  at::Tensor timesteps;      // (B) from Objective::timesteps
  at::Tensor input_noise{};  // noise of x_t instead of `noise`; undefined: the same
  // The halo, for losses that compare samples, else undefined: the sample before the first row in the global
  // batch, whose first one follows on its last. (1, C, H, W), (1, C, H, W), (1).
  at::Tensor halo_x_0{}, halo_noise{}, halo_timesteps{};
  Conditioning conditioning{};
  int64_t first_position = 0;  // position of the first row in the stream of samples
  int64_t first_row = 0;       // where this rank's rows begin in the global batch
  int64_t global_batch = 0;    // rows of all ranks; 0: only the rows here

  int64_t size() const { return x_0.size(0); }
  int64_t global_size() const { return global_batch > 0 ? global_batch : size(); }
  // The tensors with a row for each sample that are no conditions, with the arrays they are made of.
  static constexpr std::pair<BatchArray, at::Tensor StepBatch::*> kOfSamples[] = {
      {BatchArray::kX0, &StepBatch::x_0},
      {BatchArray::kNoise, &StepBatch::noise},
      {BatchArray::kTimeUniform, &StepBatch::timesteps},
      {BatchArray::kInputNoise, &StepBatch::input_noise}};

  // Visits every defined tensor in a fixed order.
  template <class Visitor>
  void visit(Visitor&& visitor) {
    for (const auto& [array, tensor] : kOfSamples)
      if ((this->*tensor).defined()) visitor(this->*tensor);
    for (at::Tensor* tensor : {&halo_x_0, &halo_noise, &halo_timesteps})
      if (tensor->defined()) visitor(*tensor);
    conditioning.visit(visitor);
  }
};
// Makes the tensors of a batch of this shape, each with `make`. The caller computes timesteps from
// `time_uniform` with the objective, hands them to set_timesteps(), and sets host_offsets of captions.
using ArrayMaker = std::function<at::Tensor(const HostArray& array, at::ScalarType dtype)>;
struct BatchTensors {
  StepBatch batch{};
  at::Tensor time_uniform{};  // (B) f64; with a halo (B + 1)
};
BatchTensors batch_tensors(const BatchShape& shape, const ArrayMaker& make);
// Sets the timesteps of the rows, and that of the halo, which is the last one if there is a halo.
void set_timesteps(StepBatch& batch, const at::Tensor& timesteps);

// Returns views of the loader's arrays. `batch` must outlive the result.
StepBatch as_tensors(const Batch& batch, const Objective& objective);

// Copies the batch to pinned memory, so that the host does not wait until the device has read it.
StepBatch pinned(StepBatch batch);

// Returns rows [first, first + size) as a batch of their own, on `device`. Its halo is the row before them.
StepBatch slice_rows(const StepBatch& batch, int64_t first, int64_t size, at::Device device);

// Returns of each row the target of the sample before it in the global batch, (B, C, H, W). `targets` are
// those of the rows. REQUIRES: the batch has a halo.
at::Tensor targets_before(const Objective& objective, const StepBatch& batch, const at::Tensor& targets);

// Returns the timesteps (count) of the samples at positions [first, first + count) of the global stream, as
// the loaders of all ranks draw them.
at::Tensor timesteps_at(const Objective& objective, uint64_t seed, int64_t first, int64_t count);
// Returns the places of those timesteps in the schedule, each in [0, 1].
std::vector<double> positions_at(const Objective& objective, uint64_t seed, int64_t first, int64_t count);

// One walk of a step: some rows of this rank, as part of a global batch.
struct MicroStep {
  StepBatch batch;  // on the device
  int64_t global_batch = 0;
  bool first = false, last = false;  // of the step
  bool is_filler = false;  // this rank has no rows left: it walks with the others but counts for nothing
};
// Returns how many walks of at most `micro_batch` images (0: all at once) a step takes. This is the number
// that the rank with the most rows needs, since all ranks take part in every collective of a walk.
int64_t num_micro_steps(const StepBatch& batch, int64_t micro_batch, int64_t world_size);
// Returns micro-step `index` of `count`.
MicroStep micro_step(const StepBatch& batch, int64_t micro_batch, int64_t index, int64_t count,
                     at::Device device);

}  // namespace kiln
