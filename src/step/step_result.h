// The result of a step: its losses and the norm of its gradient, over all micro-batches and ranks, with one
// read of the device.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "diffusion/objective.h"
#include "parallel/offload/host_copy.h"
#include "step/step_batch.h"
#include "step/training_state.h"

namespace kiln {

// What ranks tell each other along with a step, so that all decide the same.
struct RankSignals {
  bool stop = false;         // a rank was asked to stop
  double clock_seconds = 0;  // rank 0's clock
};

// What a step came to over all ranks; the same on each.
struct StepResult {
  double loss = 0;                            // mean over the global batch
  double grad_norm = 0;                       // of the mean gradient, before clipping
  bool applied = false;                       // false: loss or gradient was not finite, nothing moved
  double loss_scale = 1;                      // that this step used
  std::vector<double> losses{}, mse{}, vb{};  // (global B) each; the last two only if the objective has them
  RankSignals signals{};                      // of all ranks
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

// What a step measures, as one tensor: the losses, kind by kind, then the sum of squares. (n) f64.
at::Tensor measured(const SampleLosses& losses, const at::Tensor& gradient_sum_of_squares);

// Waits for numbers that are on their way. With several ranks on GPUs, this is where a step hangs when one is
// gone: the host looks after them meanwhile, and an Error says who.
std::vector<double> wait_for_numbers(const HostRead& numbers, ProcessGroup& group);

// What measured() gave on each rank, for the global batch, then their signals: each rank fills in its rows,
// and its part of the sums. The same bits on every rank, so that all decide the same. A collective; on the
// device, as `mine` is.
at::Tensor sum_over_ranks(const at::Tensor& mine, const StepBatch& batch, const RankSignals& signals,
                          ProcessGroup& group);
// Where among these numbers the sum of squares of the gradient is; the losses are before it.
int64_t place_of_norm(const at::Tensor& of_all_ranks);

// Takes those numbers apart. `kinds` says which losses there are; the loss is their mean, summed in the order
// of the samples. The gradient's norm is without the loss scale.
StepResult result_of(const std::vector<double>& of_all_ranks, const SampleLosses& kinds, int64_t global_batch,
                     double loss_scale);

}  // namespace kiln
