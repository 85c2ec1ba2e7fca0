// One training step: the walk over the model's segments, then the update. A pure function of (state, batch,
// lr).
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "data/batch.h"
#include "diffusion/objective.h"
#include "models/model.h"
#include "optim/optimizer.h"
#include "parallel/host_exchange.h"
#include "train/activation_offload.h"
#include "train/step_observer.h"
#include "train/training_state.h"

namespace torch::autograd {
struct Edge;
}

namespace kiln {

// What happens to a segment's activations between its forward and its backward.
enum class Activations {
  kKeep,       // autograd saves them
  kRecompute,  // only the segment's input is kept; backward runs the forward again, to the same bits
  kOffload,    // as kRecompute, and the input's hidden tensor waits in host memory; on a CPU, kRecompute
};
struct MemoryChoice {
  Activations activations = Activations::kKeep;
};

struct StepOptions {
  at::Device device = at::kCPU;
  int64_t micro_batch = 0;   // images per walk; 0 = the whole batch. The last one may be smaller
  double max_grad_norm = 0;  // 0 = no clipping
  std::string ema_schedule = "constant";
  std::vector<MemoryChoice> memory{};  // one per segment; empty = keep all
};

// A global batch, or a rank's rows of one, as tensors on the CPU, timesteps already mapped by the objective.
struct StepBatch {
  at::Tensor x_0, noise;                  // (B, C, H, W) f32
  at::Tensor timesteps;                   // (B) what Objective::timesteps gives
  at::Tensor class_labels{};              // (B) i64, undefined if unconditional
  at::Tensor text_embeds{}, text_mask{};  // (B, L, D), (B, L); undefined without captions
  int64_t first_row = 0;                  // of this rank's rows in the global batch
  int64_t global_batch = 0;               // rows of all ranks; 0: the rows here are all

  int64_t size() const { return x_0.size(0); }
  int64_t global_size() const { return global_batch > 0 ? global_batch : size(); }
};
// Views on the loader's arrays: `batch` must outlive the result.
StepBatch as_tensors(const Batch& batch, const Objective& objective);

// Rows [first, first + size) of a batch, on `device`; a batch of their own.
StepBatch slice_rows(const StepBatch& batch, int64_t first, int64_t size, at::Device device);

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

class TrainStep {
 public:
  // REQUIRES: all arguments outlive this; `state` was built from `denoiser` and `optimizer`.
  TrainStep(const Denoiser& denoiser, const Objective& objective, const Optimizer& optimizer,
            TrainingState& state, const StepOptions& options);

  // `shared`: some numbers of this rank that come back summed over all ranks, along with the losses.
  StepResult run(const StepBatch& batch, double lr, const std::vector<double>& shared = {});
  // Pinned host memory that offloaded activations take, once a step has run.
  int64_t offloaded_activation_bytes() const { return offload_ ? offload_->host_bytes() : 0; }
  // Tells `observer` what each step is doing; null ends it.
  void observe(StepObserver* observer) { observer_ = observer; }

 private:
  struct Terms;
  class Phase;  // announces a phase while in scope
  struct MicroStep;
  int64_t num_micro_steps(const StepBatch& batch) const;
  MicroStep micro_step(const StepBatch& batch, int64_t index, int64_t count) const;
  void accumulate_gradients(const MicroStep& micro, Terms& terms);
  std::vector<at::Tensor> prediction_grad(at::Tensor hidden, const MicroStep& micro,
                                          const NoisedBatch& noised, Terms& terms);
  void gather(size_t segment, int direction);
  void reduce(size_t segment, const MicroStep& micro);
  void finish_reductions();
  void backward_segment(size_t index, State& input, std::vector<torch::autograd::Edge>& outputs,
                        std::vector<at::Tensor>& grads, bool first);
  bool waits_on_host(size_t segment) const {  // the first segment's input is the batch
    return offload_ && segment > 0 && options_.memory[segment].activations == Activations::kOffload;
  }
  at::Tensor measured(const Terms& terms) const;
  at::Tensor on_host(const at::Tensor& values) const;
  at::Tensor gradient_sum_of_squares() const;
  std::vector<double> over_ranks(const at::Tensor& host, const StepBatch& batch,
                                 const std::vector<double>& shared) const;
  void update(double lr, double grad_scale);
  void read_state_ahead();
  void bring_state(size_t segment);
  void update_unit(size_t segment, const OptimizerStep& step);

  const Denoiser& denoiser_;
  const Objective& objective_;
  const Optimizer& optimizer_;
  TrainingState& state_;
  StepOptions options_;
  std::optional<ActivationOffload> offload_;
  std::optional<HostExchange> exchange_;  // of an optimizer whose state is on the host of a device
  StepObserver* observer_ = nullptr;
};

}  // namespace kiln
