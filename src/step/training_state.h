// Everything that training moves: one flat unit per segment, the count of updates and the loss scale.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "optim/loss_scaler.h"
#include "parallel/ranks/process_group.h"
#include "parallel/zero/zero.h"

namespace kiln {

class Denoiser;
class Optimizer;
class Segment;
struct Parameter;

struct TrainingStateOptions {
  at::Device device = at::kCPU;
  at::ScalarType compute_dtype = at::kFloat;
  at::ScalarType grad_dtype = at::kFloat;
  at::ScalarType master_dtype = at::kFloat;  // f32 or bf16
  uint64_t seed = 0;                         // of the rounding of bf16 masters
  std::vector<double> ema_decays;
  LossScalerOptions loss_scaler{};                                         // in use only for fp16
  std::shared_ptr<ProcessGroup> group = std::make_shared<ProcessGroup>();  // one rank
  ZeroOptions zero{};
  OffloadOptions offload{};
  const Segment* head = nullptr;  // Objective::head(), which outlives the state
  // Returns the first value of a weight of the denoiser or the head, in its shape, f32 on the device. Null:
  // weights keep the values they have.
  std::function<at::Tensor(const Parameter&)> first_value{};
};

// Bytes of training state that are not on the device.
struct OffloadedBytes {
  int64_t host = 0;  // with staging buffers; 0 on a CPU, whose memory is the device
  int64_t disk = 0;
};

class TrainingState {
 public:
  // Takes the denoiser's weights (f32) as the start and as every EMA, one weight after another. Rebinds each
  // trainable Parameter::value to a leaf on its unit's compute weights. With first_value and a denoiser of
  // outlines, the whole model never exists in f32. Untrained parameters stay f32 tensors of their own; frozen
  // ones become tensors in the compute dtype. REQUIRES: `denoiser` and `optimizer` outlive this; every rank
  // starts from the same weights. Throws Error.
  TrainingState(const Denoiser& denoiser, const Optimizer& optimizer, const TrainingStateOptions& options);
  TrainingState(const TrainingState&) = delete;

  // Returns the unit of the loss's head, or nothing.
  std::optional<size_t> head() const;
  // Returns the index of unit s in Denoiser::segments(), as a StepObserver hears it; -1 for the head.
  int64_t segment_of(size_t s) const { return segments[s].is_head ? -1 : static_cast<int64_t>(s); }

  // The trainable weights of one segment and their place in its unit.
  struct SegmentWeights {
    FlatUnit unit;
    std::vector<std::shared_ptr<Parameter>> parameters;  // slot i of the unit is parameters[i]
    std::vector<at::Tensor> grad_views;                  // slot i of the unit's gradients
    bool is_head = false;                                // of a loss: no EMAs, and a file of its own
  };
  std::vector<SegmentWeights> segments;  // as Denoiser::segments(), then the head if there is one
  std::vector<std::shared_ptr<Parameter>> constants;  // untrained weights, part of every weights file, whole
  // The base that adapters change: whole on every rank, one copy in the compute dtype. If there is a base,
  // weights files hold only the adapters.
  std::vector<std::shared_ptr<Parameter>> frozen;
  std::unique_ptr<Zero> zero;  // knows which slices of the units are here; unit i is segments[i]

  int64_t updates = 0;  // applied optimizer updates, without skipped steps
  LossScaler loss_scaler;
  std::vector<double> ema_decays;
  uint64_t seed = 0;                // of the rounding of bf16 masters
  StatePlacement placement;         // FlatUnit::lease() brings what is not on the device
  std::shared_ptr<NvmeState> nvme;  // null: nothing is on NVMe
  OffloadedBytes offloaded{};
};

}  // namespace kiln
