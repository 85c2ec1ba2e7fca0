// The result of a step: its losses and the norm of its gradient, over all micro-batches and ranks, with one
// read of the device.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace kiln {

class HostRead;
class ProcessGroup;
class TrainingState;
struct LossTerms;
struct StepBatch;

// What ranks tell each other in each step, so that all decide the same.
struct RankSignals {
  bool stop = false;         // a rank was asked to stop
  double clock_seconds = 0;  // rank 0's clock
  int64_t requests = 0;      // what rank 0 was asked to do after the step, in bits below 2^20
};

// The outcome of a step over all ranks, the same on each rank.
struct StepResult {
  double loss = 0;               // mean over the global batch
  double grad_norm = 0;          // of the mean gradient, before clipping
  bool applied = false;          // false: loss or gradient was not finite, nothing moved
  double loss_scale = 1;         // the loss scale of this step
  std::vector<double> losses{};  // (global B)
  std::vector<double> terms{};   // means over the global batch, in the order of Objective::term_names()
  RankSignals signals{};         // of all ranks
};

// This rank's losses per sample of every micro-batch. They stay on the device until the one read at the end
// of the step.
struct SampleLosses {
  std::vector<std::vector<at::Tensor>> kinds;  // the loss, then its terms; each one tensor per micro-batch

  void add(const LossTerms& of_micro_batch);
};

// Returns this rank's part of the sum of squares of all gradients: over its shards, or, where every rank has
// all gradients, on rank 0 only. An f64 scalar on `device`.
at::Tensor gradient_sum_of_squares(const TrainingState& state, at::Device device);

// Joins what a step measures into one tensor, (n) f64: the losses, kind by kind, then the sum of squares.
at::Tensor measured(const SampleLosses& losses, const at::Tensor& gradient_sum_of_squares);

// Waits for numbers that are on their way to the host. With several ranks on GPUs, a step hangs here when a
// rank is gone. So the host meanwhile checks on the ranks, and throws an Error that names the missing one. A
// dry run has no numbers.
std::vector<double> wait_for_numbers(const HostRead& numbers, ProcessGroup& group);

// Combines what measured() returned on each rank for the global batch, followed by the ranks' signals. Each
// rank fills in its rows and its part of the sums. The result is the same bits on every rank, so all decide
// the same, and is on the device, as `mine` is. A collective.
at::Tensor sum_over_ranks(const at::Tensor& mine, const StepBatch& batch, const RankSignals& signals,
                          ProcessGroup& group);
// Returns the index of the sum of squares of the gradient among these numbers. The losses come before it.
int64_t place_of_norm(const at::Tensor& of_all_ranks);

// Takes those numbers apart. The loss is the mean of the samples' losses, summed in their order. The
// gradient's norm is without the loss scale.
StepResult result_of(const std::vector<double>& of_all_ranks, int64_t global_batch, double loss_scale);

}  // namespace kiln
