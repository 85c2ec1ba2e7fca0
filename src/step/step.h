// One training step: the walk over the model's segments, then the update. A pure function of (state, batch,
// lr).
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "ops/ops.h"
#include "parallel/graph_cache.h"
#include "step/activation_offload.h"
#include "step/rank_work.h"
#include "step/step_batch.h"
#include "step/step_observer.h"
#include "step/step_result.h"

namespace kiln {

class Denoiser;
class Objective;
class Optimizer;
class TrainingState;
struct State;

// What happens to a segment's activations between its forward and its backward.
enum class Activations {
  kKeep,       // autograd saves them
  kRecompute,  // only the segment's input is kept; backward runs the forward again, to the same bits
  kOffload,    // as kRecompute, and the input's hidden tensor waits in host memory; on a CPU the same as
               // kRecompute
};
struct MemoryChoice {
  Activations activations = Activations::kKeep;
};

struct StepOptions {
  at::Device device = at::kCPU;
  int64_t micro_batch = 0;   // images per walk; 0 = the whole batch. The last one may be smaller
  double max_grad_norm = 0;  // 0 = no clipping
  EmaSchedule ema_schedule = EmaSchedule::kConstant;
  std::vector<MemoryChoice> memory{};  // one per segment; empty = keep all
  ops::OpChoices op_choices{};
  // Queue the update before the host has read what the step measured, if the optimizer can use a gradient
  // factor that only the device knows. The device then never waits for the host. On a CPU this changes only
  // the order.
  bool updates_unread = true;
  // The device on a stream of which the update runs beside the next forward, whose segments wait for theirs.
  // None: it runs among the compute. REQUIRES: no graphs, which would not wait.
  std::optional<at::Device> update_beside{};
  // Record walks of micro-batches as device graphs, one per shape up to most_shapes. REQUIRES: one rank that
  // keeps everything whole, on the device. Absent: no graphs.
  std::optional<GraphOptions> graphs{};
  uint64_t seed = 0;  // of draws inside a pass: dropout
};

class TrainStep {
 public:
  // REQUIRES: all arguments outlive this; `state` was built from `denoiser` and `optimizer`.
  TrainStep(const Denoiser& denoiser, const Objective& objective, const Optimizer& optimizer,
            TrainingState& state, const StepOptions& options);

  // `signals` of this rank reach all ranks together with the losses.
  StepResult run(const StepBatch& batch, double lr, const RankSignals& signals = {});
  // Walks one micro-batch forward and backward and forgets the gradients. It takes as much memory as a step
  // and changes nothing. A collective where weights are divided.
  void rehearse(const StepBatch& batch);
  // Returns the bytes of pinned host memory that offloaded activations take, once a step has run.
  int64_t offloaded_activation_bytes() const { return offload_ ? offload_->host_bytes() : 0; }
  // Announces to `observer` what each step does. Null: to nobody.
  void observe(StepObserver* observer) {
    observer_ = observer;
    rank_.observe(observer);
  }

 private:
  struct Walk;
  struct WalkInput {
    MicroStep micro;
    double loss_scale;
  };
  friend std::vector<at::Tensor*> graph_tensors(WalkInput& input);
  friend std::vector<int64_t> graph_key(const WalkInput& input);
  void walk(const MicroStep& micro, SampleLosses& losses);
  bool walk_as_graph(const MicroStep& micro, SampleLosses& losses);
  ops::OpChoices op_choices() const;
  void accumulate_gradients(const MicroStep& micro, SampleLosses& losses);
  Walk begin_walk(const MicroStep& micro) const;
  State forward(Walk& walk);
  std::vector<at::Tensor> prediction_grad(at::Tensor hidden, Walk& walk, SampleLosses& losses);
  void backward(Walk& walk, std::vector<at::Tensor> grads);
  void run_again(Walk& walk, size_t segment);
  void backward_segment(Walk& walk, size_t segment, std::vector<at::Tensor>& grads);
  bool begin_gradients(size_t unit, bool first_micro_step);
  void keep_gradients(size_t unit, const std::vector<at::Tensor>& found, bool adds);
  at::Tensor measured_by_all(const SampleLosses& losses, const StepBatch& batch, const RankSignals& signals);
  MicroStep next_micro_step(const StepBatch& batch, int64_t index, int64_t count) const;
  bool keeps(size_t segment) const { return options_.memory[segment].activations == Activations::kKeep; }
  bool waits_on_host(size_t segment) const {  // the first segment's input is the batch, which stays
    return offload_ && segment > 0 && options_.memory[segment].activations == Activations::kOffload;
  }
  PhaseScope announce(StepPhase phase, size_t segment) const {
    return {observer_, phase, static_cast<int64_t>(segment)};
  }

  const Denoiser& denoiser_;
  const Objective& objective_;
  TrainingState& state_;
  StepOptions options_;
  RankWork rank_;
  std::optional<ActivationOffload> offload_;
  std::optional<GraphCache<WalkInput>> graphs_;
  StepObserver* observer_ = nullptr;
};

}  // namespace kiln
