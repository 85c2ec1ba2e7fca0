// What a step tells: its losses and the norm of its gradient, over all micro-batches and ranks, for one read
// of the device.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "diffusion/objective.h"
#include "train/step_batch.h"
#include "train/training_state.h"

namespace kiln {

// Of all ranks, the same on each.
struct StepResult {
  double loss = 0;        // mean over the global batch
  double grad_norm = 0;   // of the mean gradient, before clipping
  bool applied = false;   // false: loss or gradient was not finite, nothing moved
  double loss_scale = 1;  // that this step used
  std::vector<double> losses{}, mse{},
      vb{};                      // (global B) each; mse and vb empty where the objective has none
  std::vector<double> shared{};  // what the ranks gave run(), summed
};

// This rank's losses per sample of every micro-batch, on the device until the one read at the end of the
// step.
struct SampleLosses {
  std::vector<at::Tensor> loss, mse, vb;  // as LossTerms, one per micro-batch

  void add(const LossTerms& terms);
};

// This rank's part of the sum of squares of all gradients: over its shards, or, where every rank has all
// gradients, on rank 0 only. f64 scalar on `device`.
at::Tensor gradient_sum_of_squares(const TrainingState& state, at::Device device);

// What a step measures, as one tensor: the losses, kind by kind, then gradient_sum_of_squares. (n) f64 on
// `device`.
at::Tensor measured(const SampleLosses& losses, const TrainingState& state, at::Device device);

// Waits for the device and reads `values`. With several ranks on GPUs, this is where a step hangs when one is
// gone: the host looks after them meanwhile, and an Error says who.
std::vector<double> read_from_device(const at::Tensor& values, ProcessGroup& group);

// What measured() gave on each rank, for the global batch, then the sums of `shared`: each rank fills in its
// rows, and its part of the sums. The same bits on every rank, so that all decide the same. A collective.
std::vector<double> sum_over_ranks(std::vector<double> mine, const StepBatch& batch,
                                   const std::vector<double>& shared, ProcessGroup& group);

// Takes the sums of `num_shared` values, the gradient's norm, without the loss scale, and the losses apart,
// of which `kinds` says which there are; their mean is the loss, summed in the order of the samples.
StepResult result_of(std::vector<double> of_all_ranks, const SampleLosses& kinds, int64_t global_batch,
                     size_t num_shared, double loss_scale);

}  // namespace kiln
