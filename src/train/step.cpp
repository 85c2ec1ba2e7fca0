// One training step, from the top. Forward: each segment runs on detached inputs, so that its graph is its
// own (train/segment_graph.h). Backward: in reverse, autograd runs inside one segment at a time, and what
// leaves it goes into the unit's flat gradients. Every gradient is bitwise that of one autograd pass over the
// whole model. Every memory choice is a line in one of the two loops.
#include "train/step.h"

#include <cmath>
#include <utility>

#include "core/aten.h"
#include "core/error.h"
#include "ops/mixed_sum.h"
#include "optim/grad_norm.h"
#include "parallel/host_memory.h"
#include "train/segment_graph.h"

namespace kiln {

TrainStep::TrainStep(const Denoiser& denoiser, const Objective& objective, const Optimizer& optimizer,
                     TrainingState& state, const StepOptions& options)
    : denoiser_(denoiser),
      objective_(objective),
      state_(state),
      options_(options),
      update_(optimizer, state, options.device, options.ema_schedule) {
  const size_t num_segments = denoiser.segments().size();
  if (options_.memory.empty()) options_.memory.resize(num_segments);
  if (options_.memory.size() != num_segments)
    fail("step", "expected a memory choice for each of {} segments, got {}", num_segments,
         options_.memory.size());
  if (has_host_behind(options_.device)) offload_.emplace(options_.device, num_segments);
}

StepResult TrainStep::run(const StepBatch& loaded, double lr, const std::vector<double>& shared) {
  const StepBatch batch = options_.device.is_cuda() ? pinned(loaded) : loaded;
  const int64_t count = num_micro_steps(batch, options_.micro_batch, state_.zero->group().world_size());
  SampleLosses losses;
  for (int64_t index = 0; index < count; ++index) {
    const MicroStep micro = [&] {
      const PhaseScope phase(observer_, StepPhase::kInput);
      return micro_step(batch, options_.micro_batch, index, count, options_.device);
    }();
    accumulate_gradients(micro, losses);
  }
  finish_reductions();

  std::vector<double> numbers;
  {
    const PhaseScope phase(observer_, StepPhase::kGradNorm);
    const at::Tensor on_device = measured(losses, state_, options_.device);
    // The one host synchronisation of the step. A dry run (plan) has no numbers.
    if (!on_device.is_meta()) numbers = read_from_device(on_device, state_.zero->group());
  }
  if (numbers.empty()) {
    update_.run(lr, /*grad_scale=*/1);
    return {.loss_scale = state_.loss_scaler.scale()};
  }
  StepResult result = result_over_ranks(std::move(numbers), losses, batch, shared);
  result.applied = std::isfinite(result.loss) && std::isfinite(result.grad_norm);
  state_.loss_scaler.update(result.applied);
  if (result.applied)  // a skipped step moves nothing, EMA included
    update_.run(lr, clip_coefficient(result.grad_norm, options_.max_grad_norm) / result.loss_scale);
  return result;
}

// One micro-batch on its way through the model.
struct TrainStep::Walk {
  const MicroStep& micro;
  NoisedBatch noised;
  DenoiserInput input;
  std::vector<State> inputs;   // of each segment
  std::vector<Edges> outputs;  // of those whose graph there is
};

// Forward and backward of one micro-batch. The loss is the mean over the global batch, so micro-batches of
// any size add up to it.
void TrainStep::accumulate_gradients(const MicroStep& micro, SampleLosses& losses) {
  Walk walk = begin_walk(micro);
  State last = forward(walk);
  if (micro.last) update_.read_ahead();
  std::vector<at::Tensor> grads = prediction_grad(std::exchange(last, {}).hidden, walk, losses);
  backward(walk, std::move(grads));
}

TrainStep::Walk TrainStep::begin_walk(const MicroStep& micro) const {
  const PhaseScope phase(observer_, StepPhase::kInput);
  const StepBatch& batch = micro.batch;
  const size_t num_segments = denoiser_.segments().size();
  Walk walk{.micro = micro,
            .noised = objective_.add_noise(batch.x_0, batch.noise, batch.timesteps),
            .input = {},
            .inputs = std::vector<State>(num_segments),
            .outputs = std::vector<Edges>(num_segments)};
  walk.input = {.x_t = walk.noised.x_t,
                .timesteps = walk.noised.model_t,
                .class_labels = batch.class_labels,
                .text_embeds = batch.text_embeds,
                .text_mask = batch.text_mask};
  return walk;
}

// Returns what the last segment gives.
State TrainStep::forward(Walk& walk) {
  const auto& segments = denoiser_.segments();
  State state;
  for (size_t i = 0; i < segments.size(); ++i) {
    gather(i, 1);
    const PhaseScope phase = announce(StepPhase::kForward, i);
    at::AutoGradMode with_graph(keeps(i));
    State& input = walk.inputs[i];
    input = detached(std::move(state), keeps(i));
    if (waits_on_host(i)) offload_->store(i, input.hidden);
    state = segments[i]->forward(input, walk.input);
    if (keeps(i)) walk.outputs[i] = edges_of(state);
    if (waits_on_host(i)) {
      input.hidden.reset();
      offload_->release(i);
    }
    if (i + 1 < segments.size()) state_.zero->release(i);  // backward begins with the last one
  }
  return state;
}

// The loss of a micro-batch, added to `losses`; returns its gradient, scaled for the global batch.
std::vector<at::Tensor> TrainStep::prediction_grad(at::Tensor hidden, const Walk& walk,
                                                   SampleLosses& losses) {
  const PhaseScope phase(observer_, StepPhase::kLoss);
  at::AutoGradMode with_graph(true);
  const MicroStep& micro = walk.micro;
  const size_t last = denoiser_.segments().size() - 1;
  if (waits_on_host(last)) offload_->fetch(last);
  at::Tensor prediction = hidden.detach().set_requires_grad(true);
  hidden.reset();
  const LossTerms loss = objective_.loss(prediction, micro.batch.x_0, micro.batch.noise, walk.noised);
  if (!micro.is_filler) losses.add(loss);
  const double scale =
      micro.is_filler ? 0 : state_.loss_scaler.scale() / static_cast<double>(micro.global_batch);
  return gradient_of(loss.loss.sum() * scale, prediction);
}

// `grads`: of the last segment's outputs.
void TrainStep::backward(Walk& walk, std::vector<at::Tensor> grads) {
  for (size_t i = denoiser_.segments().size(); i-- > 0;) {
    gather(i, -1);
    if (!keeps(i)) run_again(walk, i);
    {
      const PhaseScope phase = announce(StepPhase::kBackward, i);
      if (i > 0 && waits_on_host(i - 1)) offload_->fetch(i - 1);
      backward_segment(walk, i, grads);
      state_.zero->release(i);
    }
    reduce(i, walk.micro);
  }
}

// The forward of a segment whose activations were not kept, this time with its graph.
void TrainStep::run_again(Walk& walk, size_t segment) {
  const PhaseScope phase = announce(StepPhase::kRecompute, segment);
  at::AutoGradMode with_graph(true);
  State& input = walk.inputs[segment];
  if (waits_on_host(segment)) input.hidden = offload_->take(segment);
  input = detached(std::move(input), true);
  State recomputed = denoiser_.segments()[segment]->forward(input, walk.input);
  walk.outputs[segment] = edges_of(recomputed);
}

// Turns the gradients of a segment's outputs into those of its inputs, adds its weights' gradients to the
// flat buffer and frees its activations.
void TrainStep::backward_segment(Walk& walk, size_t segment, std::vector<at::Tensor>& grads) {
  const TrainingState::SegmentWeights& weights = state_.segments[segment];
  const bool adds = state_.zero->begin_gradients(segment, walk.micro.first);
  SegmentGradients found = backward_through(std::exchange(walk.outputs[segment], {}), std::move(grads),
                                            weights.parameters, std::exchange(walk.inputs[segment], {}));
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < found.weights.size(); ++i) {
    at::Tensor flat = weights.grad_views[i];
    if (!found.weights[i].defined()) {
      if (!adds) flat.zero_();
    } else if (adds) {
      ops::mixed_add_(flat, found.weights[i]);
    } else {
      flat.copy_(found.weights[i]);
    }
  }
  grads = std::move(found.inputs);
}

// Waits for the whole weights of a segment; those of the next one in `direction` follow while it computes.
void TrainStep::gather(size_t segment, int direction) {
  if (state_.zero->idle()) return;
  const PhaseScope phase = announce(StepPhase::kCommunication, segment);
  state_.zero->gather(segment, direction);
}

void TrainStep::reduce(size_t segment, const MicroStep& micro) {
  if (state_.zero->idle()) return;
  const PhaseScope phase = announce(StepPhase::kCommunication, segment);
  at::NoGradGuard no_grad;
  state_.zero->reduce(segment, micro.first, micro.last);
}

void TrainStep::finish_reductions() {
  if (state_.zero->idle()) return;
  const PhaseScope phase(observer_, StepPhase::kCommunication);
  at::NoGradGuard no_grad;
  state_.zero->finish_reductions();
}

StepResult TrainStep::result_over_ranks(std::vector<double> measured, const SampleLosses& losses,
                                        const StepBatch& batch, const std::vector<double>& shared) const {
  ProcessGroup& group = state_.zero->group();
  std::optional<PhaseScope> phase;
  if (group.world_size() > 1) phase.emplace(observer_, StepPhase::kCommunication);
  return result_of(sum_over_ranks(std::move(measured), batch, shared, group), losses, batch.global_size(),
                   shared.size(), state_.loss_scaler.scale());
}

}  // namespace kiln
