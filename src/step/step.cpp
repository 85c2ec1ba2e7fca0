// One training step, from the top. Forward: each segment runs on detached inputs, so that its graph is its
// own (step/segment_graph.h). Backward: in reverse, autograd runs inside one segment at a time, and what
// leaves it goes into the unit's flat gradients. Every gradient is bitwise that of one autograd pass over the
// whole model that sums each segment's share of a gradient first. Every memory choice is a line in one of the
// two loops.
#include "step/step.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "core/aten.h"
#include "core/error.h"
#include "diffusion/objective.h"
#include "models/parts/adapter_dropout.h"
#include "ops/gradient_memory.h"
#include "ops/mixed_sum.h"
#include "optim/grad_norm.h"
#include "parallel/offload/host_copy.h"
#include "step/segment_graph.h"
#include "step/training_state.h"

namespace kiln {

TrainStep::TrainStep(const Denoiser& denoiser, const Objective& objective, const Optimizer& optimizer,
                     TrainingState& state, const StepOptions& options)
    : denoiser_(denoiser),
      objective_(objective),
      state_(state),
      options_(options),
      rank_(optimizer, state, options.device, options.ema_schedule, options.update_beside) {
  const size_t num_segments = denoiser.segments().size();
  if (options_.memory.empty()) options_.memory.resize(num_segments);
  if (options_.memory.size() != num_segments)
    fail("step", "expected a memory choice for each of {} segments, got {}", num_segments,
         options_.memory.size());
  for (const size_t tap : objective.taps()) {
    if (tap >= num_segments)
      fail("step", "expected a loss that taps one of {} segments, got {}", num_segments, tap);
    // The loss keeps this output on the device, so that moving it to the host would free nothing.
    if (tap + 1 < num_segments && options_.memory[tap + 1].activations == Activations::kOffload)
      options_.memory[tap + 1].activations = Activations::kRecompute;
  }
  if (state_.placement.has_host) offload_.emplace(options_.device, num_segments);
  if (!options_.graphs) return;
  const auto work = [this](const WalkInput& input) {
    SampleLosses losses;
    accumulate_gradients(input.micro, losses);
    std::vector<at::Tensor> kinds;
    for (const auto& kind : losses.kinds) kinds.push_back(kind.front());
    return kinds;
  };
  graphs_.emplace(work, *options_.graphs);
}

StepResult TrainStep::run(const StepBatch& loaded, double lr, const RankSignals& signals) {
  const StepBatch batch = options_.device.is_cuda() ? pinned(loaded) : loaded;
  const int64_t count = num_micro_steps(batch, options_.micro_batch, state_.zero->group().world_size());
  SampleLosses losses;
  for (int64_t index = 0; index < count; ++index) {
    const MicroStepScope scope(observer_, index);
    walk(next_micro_step(batch, index, count), losses);
  }
  rank_.finish_reductions();

  const at::Tensor numbers = measured_by_all(losses, batch, signals);
  const HostRead read(numbers);
  const int64_t norm = place_of_norm(numbers);
  if (options_.updates_unread)
    rank_.update_ahead(lr, numbers.narrow(0, 0, norm), numbers[norm], options_.max_grad_norm);
  StepResult result;
  {
    // The one host synchronisation of the step.
    const PhaseScope phase(observer_, StepPhase::kGradNorm);
    result = result_of(wait_for_numbers(read, state_.zero->group()), batch.global_size(),
                       state_.loss_scaler.scale());
  }
  result.applied = std::isfinite(result.loss) && std::isfinite(result.grad_norm);
  state_.loss_scaler.update(result.applied);
  if (result.applied) {  // a skipped step moves nothing, EMA included
    rank_.update(lr, clip_coefficient(result.grad_norm, options_.max_grad_norm) / result.loss_scale);
    ++state_.updates;
  }
  return result;
}

void TrainStep::rehearse(const StepBatch& loaded) {
  const StepBatch batch = options_.device.is_cuda() ? pinned(loaded) : loaded;
  SampleLosses losses;
  MicroStep micro = next_micro_step(batch, 0, 1);
  micro.last = false;  // below stage 2 nothing is reduced, and no state is read ahead for an update
  accumulate_gradients(micro, losses);
  rank_.finish_reductions();
}

MicroStep TrainStep::next_micro_step(const StepBatch& batch, int64_t index, int64_t count) const {
  const PhaseScope phase(observer_, StepPhase::kInput);
  return micro_step(batch, options_.micro_batch, index, count, options_.device);
}

// One micro-batch on its way through the model.
struct TrainStep::Walk {
  const MicroStep& micro;
  NoisedBatch noised;
  ModelInput input;
  DropoutDraws dropout{};
  std::vector<State> inputs;   // of each segment
  std::vector<Edges> outputs;  // of each segment that has a graph
  std::vector<bool> trains;    // per segment: whether its weights or inputs need a gradient
  SkipGradients skip_grads{};
  Taps taps;
};

std::vector<at::Tensor*> graph_tensors(TrainStep::WalkInput& input) {
  std::vector<at::Tensor*> tensors;
  input.micro.batch.visit([&](at::Tensor& tensor) { tensors.push_back(&tensor); });
  return tensors;
}

std::vector<int64_t> graph_key(const TrainStep::WalkInput& input) {
  const MicroStep& micro = input.micro;
  std::vector<int64_t> key = host_numbers(micro.batch.conditioning);
  for (const auto& [array, tensor] : StepBatch::kOfSamples) key.push_back((micro.batch.*tensor).defined());
  key.insert(key.end(), {micro.global_batch, micro.first, micro.last, micro.is_filler,
                         std::bit_cast<int64_t>(input.loss_scale)});
  return key;
}

void TrainStep::walk(const MicroStep& micro, SampleLosses& losses) {
  if (!graphs_ || !walk_as_graph(micro, losses)) accumulate_gradients(micro, losses);
}

// Returns false if the micro-batch has to be walked kernel by kernel instead.
bool TrainStep::walk_as_graph(const MicroStep& micro, SampleLosses& losses) {
  const PhaseScope phase(observer_, StepPhase::kGraph);
  StepObserver* const observer = observer_;
  observe(nullptr);  // a recording runs nothing, and a replay announces none of its phases
  const auto kinds = graphs_->run({.micro = micro, .loss_scale = state_.loss_scaler.scale()});
  observe(observer);
  if (!kinds) return false;
  losses.add({.loss = kinds->front(), .terms = {kinds->begin() + 1, kinds->end()}});
  return true;
}

// A loss that taps a segment's output, and activations that wait on the host, want all of it in
// State::hidden.
ops::OpChoices TrainStep::op_choices() const {
  const bool offloads = std::ranges::any_of(options_.memory, [](const MemoryChoice& choice) {
    return choice.activations == Activations::kOffload;
  });
  ops::OpChoices choices = options_.op_choices;
  choices.hand_on_branch &= objective_.taps().empty() && !offloads;
  return choices;
}

// Forward and backward of one micro-batch. The loss is the mean over the global batch, so micro-batches of
// any size add up to it.
void TrainStep::accumulate_gradients(const MicroStep& micro, SampleLosses& losses) {
  const ops::OpChoicesScope choices(op_choices());
  Walk walk = begin_walk(micro);
  State last = forward(walk);
  if (micro.last) rank_.read_ahead();
  const std::optional<size_t> head = state_.head();
  if (head) rank_.gather(*head, 1);
  std::vector<at::Tensor> grads = prediction_grad(std::exchange(last, {}).hidden, walk, losses);
  if (head) rank_.reduce(*head, micro.first, micro.last);
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
            .outputs = std::vector<Edges>(num_segments),
            .trains = std::vector<bool>(num_segments),
            .taps = Taps(objective_.taps())};
  if (batch.input_noise.defined())  // the target stays as it is
    walk.noised.x_t = objective_.add_noise(batch.x_0, batch.input_noise, batch.timesteps).x_t;
  if (objective_.compares_samples())
    walk.noised.other_target = targets_before(objective_, batch, walk.noised.target);
  walk.input = {.x_t = walk.noised.x_t, .timesteps = walk.noised.model_t, .conditioning = batch.conditioning};
  walk.dropout = {.seed = options_.seed,
                  .first_position = batch.first_position,
                  .num_samples = batch.size(),
                  .text_offsets = batch.conditioning.text.offsets};
  return walk;
}

// Returns what the last segment gives.
State TrainStep::forward(Walk& walk) {
  const auto& segments = denoiser_.segments();
  State state;
  SkipStack skips;
  for (size_t i = 0; i < segments.size(); ++i) {
    rank_.gather(i, 1);
    const PhaseScope phase = announce(StepPhase::kForward, i);
    State& input = walk.inputs[i];
    skips.enter(state, segments[i]->skips());
    input = detached(std::move(state));
    const bool has_weights = !state_.segments[i].parameters.empty();
    walk.trains[i] = has_weights || any_requires_grad(input);
    const bool has_graph = keeps(i) && walk.trains[i];
    const bool is_stored = waits_on_host(i) && walk.trains[i];
    if (is_stored) offload_->store(i, input.hidden);
    {
      at::AutoGradMode with_graph(has_graph);
      const DropoutScope dropout(walk.dropout);
      state = segments[i]->forward(input, walk.input);
    }
    if (has_graph)
      walk.outputs[i] = edges_of(state);
    else
      mark_trained(input, state, has_weights);
    skips.leave(state, segments[i]->skips());
    walk.taps.keep(i, state);
    if (is_stored) {
      input.hidden.reset();
      offload_->release(i);
    }
    if (!walk.trains[i]) input = {};
    if (i + 1 < segments.size()) rank_.release(i);  // backward begins with the last one
  }
  return state;
}

// Adds the loss of a micro-batch to `losses`, and the gradients of a head's weights to the flat buffer.
// Returns the gradient by the prediction, scaled for the global batch.
std::vector<at::Tensor> TrainStep::prediction_grad(at::Tensor hidden, Walk& walk, SampleLosses& losses) {
  const PhaseScope phase(observer_, StepPhase::kLoss);
  at::AutoGradMode with_graph(true);
  const MicroStep& micro = walk.micro;
  const size_t last = denoiser_.segments().size() - 1;
  if (waits_on_host(last)) offload_->fetch(last);
  at::Tensor prediction = hidden.detach().set_requires_grad(true);
  hidden.reset();
  NoisedBatch noised = walk.noised;
  noised.taps = walk.taps.kept();
  const LossTerms loss = objective_.loss(prediction, micro.batch.x_0, micro.batch.noise, noised);
  if (!micro.is_filler) losses.add(loss);
  const double scale =
      micro.is_filler ? 0 : state_.loss_scaler.scale() / static_cast<double>(micro.global_batch);
  const at::Tensor scalar = loss.loss.sum() * scale;
  const std::optional<size_t> head = state_.head();
  if (!head) return walk.taps.loss_gradients(scalar, prediction, /*of_head=*/{}).inputs;
  const bool adds = begin_gradients(*head, micro.first);
  SegmentGradients found = walk.taps.loss_gradients(scalar, prediction, state_.segments[*head].parameters);
  keep_gradients(*head, found.weights, adds);
  rank_.release(*head);
  return std::move(found.inputs);
}

// `grads` belong to the last segment's outputs. Stops where no earlier segment is trained.
void TrainStep::backward(Walk& walk, std::vector<at::Tensor> grads) {
  for (size_t i = denoiser_.segments().size(); i-- > 0;) {
    if (!walk.trains[i]) break;
    rank_.gather(i, -1);
    if (!keeps(i)) run_again(walk, i);
    {
      const PhaseScope phase = announce(StepPhase::kBackward, i);
      if (i > 0 && waits_on_host(i - 1) && walk.trains[i - 1]) offload_->fetch(i - 1);
      walk.taps.add_gradient(i, grads);
      backward_segment(walk, i, grads);
      rank_.release(i);
    }
    rank_.reduce(i, walk.micro.first, walk.micro.last);
  }
}

// Repeats the forward of a segment whose activations were not kept, this time with its graph.
void TrainStep::run_again(Walk& walk, size_t segment) {
  const PhaseScope phase = announce(StepPhase::kRecompute, segment);
  at::AutoGradMode with_graph(true);
  State& input = walk.inputs[segment];
  if (waits_on_host(segment))
    input.hidden = offload_->take(segment).set_requires_grad(walk.trains[segment - 1]);
  input = detached(std::move(input));
  const DropoutScope dropout(walk.dropout);
  State recomputed = denoiser_.segments()[segment]->forward(input, walk.input);
  walk.outputs[segment] = edges_of(recomputed);
}

// Turns the gradients of a segment's outputs into those of its inputs, adds its weights' gradients to the
// flat buffer and frees its activations.
void TrainStep::backward_segment(Walk& walk, size_t segment, std::vector<at::Tensor>& grads) {
  const TrainingState::SegmentWeights& weights = state_.segments[segment];
  const SkipUse skips = denoiser_.segments()[segment]->skips();
  walk.skip_grads.append_pushed(grads, skips.pushes);
  const bool adds = begin_gradients(segment, walk.micro.first);
  SegmentGradients found = backward_through(std::exchange(walk.outputs[segment], {}), std::move(grads),
                                            weights.parameters, std::exchange(walk.inputs[segment], {}));
  keep_gradients(segment, found.weights, adds);
  grads = std::move(found.inputs);
  walk.skip_grads.take_popped(grads, skips.pops);
}

// Lends a unit's flat gradients to the backward that follows. Returns true if they hold those of earlier
// micro-steps, to be added to.
bool TrainStep::begin_gradients(size_t unit, bool first_micro_step) {
  const TrainingState::SegmentWeights& weights = state_.segments[unit];
  const bool adds = rank_.begin_gradients(unit, first_micro_step);
  for (size_t i = 0; i < weights.parameters.size(); ++i)
    ops::lend_gradient_memory(weights.parameters[i]->value, adds ? at::Tensor() : weights.grad_views[i]);
  return adds;
}

// Brings the gradients that a backward has found, one per parameter, into the unit's flat buffer.
void TrainStep::keep_gradients(size_t unit, const std::vector<at::Tensor>& found, bool adds) {
  const TrainingState::SegmentWeights& weights = state_.segments[unit];
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < found.size(); ++i) {
    at::Tensor flat = weights.grad_views[i];
    ops::lend_gradient_memory(weights.parameters[i]->value, {});
    if (found[i].is_same(flat)) continue;
    if (!found[i].defined()) {
      if (!adds) flat.zero_();
    } else if (adds) {
      ops::mixed_add_(flat, found[i]);
    } else {
      flat.copy_(found[i]);
    }
  }
}

// Returns the losses and the gradient norm over all ranks, on the device.
at::Tensor TrainStep::measured_by_all(const SampleLosses& losses, const StepBatch& batch,
                                      const RankSignals& signals) {
  ProcessGroup& group = state_.zero->group();
  at::NoGradGuard no_grad;
  at::Tensor mine;
  {
    const PhaseScope phase(observer_, StepPhase::kGradNorm);
    mine = measured(losses, rank_.gradient_sum_of_squares());
    if (!group.sends()) return sum_over_ranks(mine, batch, signals, group);
  }
  const PhaseScope phase(observer_, StepPhase::kCommunication);
  return sum_over_ranks(mine, batch, signals, group);
}

}  // namespace kiln
