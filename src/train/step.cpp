// One training step. Forward: each segment runs on detached inputs, so that its graph is its own. Backward:
// in reverse, autograd runs inside one segment at a time, and what leaves it goes into the unit's flat
// gradients. Every gradient is bitwise that of one autograd pass over the whole model. Every memory choice is
// a line in one of the two loops.
#include "train/step.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>

#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "ops/mixed_sum.h"
#include "optim/ema.h"
#include "optim/grad_norm.h"
#include "parallel/host_memory.h"

namespace kiln {

namespace {

// The same tensors, cut from whatever graph they come from; leaves that collect a gradient when `with_grad`.
State detached(State state, bool with_grad) {
  state.visit([&](at::Tensor& tensor) { tensor = tensor.detach().set_requires_grad(with_grad); });
  return state;
}

std::vector<at::Tensor> tensors_of(State& state) {
  std::vector<at::Tensor> tensors;
  state.visit([&](at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

// Where a segment's outputs hang in its graph: what a backward needs of them, without their storage.
using Edges = std::vector<torch::autograd::Edge>;

Edges edges_of(State& state) {
  Edges edges;
  for (const at::Tensor& tensor : tensors_of(state))
    edges.push_back(tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor)
                                           : torch::autograd::Edge());
  return edges;
}

// Where the gradient of a leaf arrives. Making the edge of a leaf that the graph does not use costs nothing.
torch::autograd::Edge leaf_edge(const at::Tensor& leaf) { return torch::autograd::impl::gradient_edge(leaf); }

// In pinned memory, from which a copy does not hold up the host until the device comes to it.
StepBatch pinned(StepBatch batch) {
  for (at::Tensor* tensor : {&batch.x_0, &batch.noise, &batch.timesteps, &batch.class_labels,
                             &batch.text_embeds, &batch.text_mask})
    if (tensor->defined()) *tensor = tensor->pin_memory();
  return batch;
}

std::vector<double> to_vector(const at::Tensor& values) {
  return {values.data_ptr<double>(), values.data_ptr<double>() + values.numel()};
}

}  // namespace

class TrainStep::Phase {
 public:
  Phase(const TrainStep& step, StepPhase phase, size_t segment)
      : Phase(step, phase, static_cast<int64_t>(segment)) {}
  Phase(const TrainStep& step, StepPhase phase, int64_t segment = -1)
      : observer_(step.observer_), phase_(phase), segment_(segment) {
    if (observer_) observer_->begin(phase_, segment_);
  }
  ~Phase() {
    if (observer_) observer_->end(phase_, segment_);
  }
  Phase(const Phase&) = delete;

 private:
  StepObserver* observer_;
  StepPhase phase_;
  int64_t segment_;
};

// Losses per sample of every micro-batch, left on the device until the one read at the end of the step.
struct TrainStep::Terms {
  std::vector<at::Tensor> loss, mse, vb;

  void add(const LossTerms& terms) {
    loss.push_back(terms.loss.detach());
    if (terms.mse.defined()) mse.push_back(terms.mse.detach());
    if (terms.vb.defined()) vb.push_back(terms.vb.detach());
  }
};

// One walk: some rows of this rank, as part of a global batch.
struct TrainStep::MicroStep {
  StepBatch batch;
  int64_t global_batch = 0;
  bool first = false, last = false;  // of the step
  bool is_filler = false;  // this rank has no rows left: it walks with the others, and counts for nothing
};

TrainStep::TrainStep(const Denoiser& denoiser, const Objective& objective, const Optimizer& optimizer,
                     TrainingState& state, const StepOptions& options)
    : denoiser_(denoiser), objective_(objective), optimizer_(optimizer), state_(state), options_(options) {
  const size_t num_segments = denoiser.segments().size();
  if (options_.memory.empty()) options_.memory.resize(num_segments);
  if (options_.memory.size() != num_segments)
    fail("step", "expected a memory choice for each of {} segments, got {}", num_segments,
         options_.memory.size());
  if (!has_host_behind(options_.device)) return;
  offload_.emplace(options_.device, num_segments);
  if (state_.placement == Placement::kDevice) return;
  const FlatUnit* largest = &state_.segments.front().unit;
  for (const auto& segment : state_.segments)
    if (segment.unit.shard_size() > largest->shard_size()) largest = &segment.unit;
  exchange_.emplace(options_.device, largest->shard_size(), largest->grad_shard.scalar_type(),
                    largest->compute_weights.scalar_type());
  state_.offloaded.host += exchange_->host_bytes();
}

StepResult TrainStep::run(const StepBatch& loaded, double lr, const std::vector<double>& shared) {
  const StepBatch batch = options_.device.is_cuda() ? pinned(loaded) : loaded;
  const int64_t global_batch = batch.global_size();
  StepResult result{.loss_scale = state_.loss_scaler.scale()};

  Terms terms;
  const int64_t count = num_micro_steps(batch);
  for (int64_t index = 0; index < count; ++index) {
    const MicroStep micro = micro_step(batch, index, count);
    accumulate_gradients(micro, terms);
  }
  finish_reductions();

  const at::Tensor host = measured(terms);
  if (host.is_meta()) {  // a dry run (plan) has no numbers: it applies every step
    update(lr, 1);
    return result;
  }
  std::vector<double> values_of_all = over_ranks(host, batch, shared);
  result.shared.assign(values_of_all.end() - static_cast<int64_t>(shared.size()), values_of_all.end());
  values_of_all.resize(values_of_all.size() - shared.size());
  int64_t offset = 0;
  for (auto [list, values] :
       {std::pair{&terms.loss, &result.losses}, {&terms.mse, &result.mse}, {&terms.vb, &result.vb}}) {
    if (list->empty()) continue;
    const auto begin = values_of_all.begin() + offset;
    values->assign(begin, begin + global_batch);
    offset += global_batch;
  }
  for (double loss : result.losses) result.loss += loss / static_cast<double>(global_batch);
  result.grad_norm = std::sqrt(values_of_all.back()) / result.loss_scale;

  result.applied = std::isfinite(result.loss) && std::isfinite(result.grad_norm);
  state_.loss_scaler.update(result.applied);
  if (result.applied)  // a skipped step moves nothing, EMA included
    update(lr, clip_coefficient(result.grad_norm, options_.max_grad_norm) / result.loss_scale);
  return result;
}

// The one host synchronisation of the step: losses per sample and the gradient's sum of squares in a single
// copy.
at::Tensor TrainStep::measured(const Terms& terms) const {
  const Phase phase(*this, StepPhase::kGradNorm);
  std::vector<at::Tensor> on_device;
  for (const auto* list : {&terms.loss, &terms.mse, &terms.vb})
    for (const at::Tensor& values : *list) on_device.push_back(values.to(at::kDouble));
  on_device.push_back(gradient_sum_of_squares().reshape({1}));
  const at::Tensor values = at::cat(on_device);
  return values.is_meta() ? values : on_host(values);
}

// With several ranks on GPUs, this is where a step hangs when one is gone: the host looks after them
// meanwhile.
at::Tensor TrainStep::on_host(const at::Tensor& values) const {
  ProcessGroup& group = state_.zero->group();
  const std::optional<c10::Event> computed = record_event(options_.device);
  if (computed && group.world_size() > 1) group.wait_until([&] { return computed->query(); }, "a step");
  return values.cpu();
}

// The values of measured() for the global batch, then the shared ones: each rank fills in its rows, and its
// part of the sums. The same bits on every rank, so that all decide the same.
std::vector<double> TrainStep::over_ranks(const at::Tensor& host, const StepBatch& batch,
                                          const std::vector<double>& shared) const {
  std::vector<double> mine = to_vector(host);
  ProcessGroup& group = state_.zero->group();
  if (group.world_size() == 1) {
    mine.insert(mine.end(), shared.begin(), shared.end());
    return mine;
  }
  const Phase phase(*this, StepPhase::kCommunication);
  const auto rows = static_cast<size_t>(batch.size()), all_rows = static_cast<size_t>(batch.global_size());
  const size_t num_terms = (mine.size() - 1) / rows;
  std::vector<double> values(num_terms * all_rows + 1);
  for (size_t term = 0; term < num_terms; ++term)
    std::copy_n(mine.begin() + static_cast<int64_t>(term * rows), rows,
                values.begin() + static_cast<int64_t>(term * all_rows) + batch.first_row);
  values.back() = mine.back();
  values.insert(values.end(), shared.begin(), shared.end());
  return group.sum(std::move(values), "losses and gradient norm");
}

// As many as the rank with the most rows needs: all ranks take part in every collective of a walk.
int64_t TrainStep::num_micro_steps(const StepBatch& batch) const {
  const int64_t world_size = state_.zero->group().world_size();
  const int64_t most_rows = (batch.global_size() + world_size - 1) / world_size;
  return options_.micro_batch > 0 ? (most_rows + options_.micro_batch - 1) / options_.micro_batch : 1;
}

TrainStep::MicroStep TrainStep::micro_step(const StepBatch& batch, int64_t index, int64_t count) const {
  const Phase phase(*this, StepPhase::kInput);
  const int64_t micro_batch = options_.micro_batch > 0 ? options_.micro_batch : batch.size();
  const int64_t first_row = index * micro_batch;
  const bool is_filler = first_row >= batch.size();
  const int64_t size = is_filler ? 1 : std::min(micro_batch, batch.size() - first_row);
  return {.batch = slice_rows(batch, is_filler ? 0 : first_row, size, options_.device),
          .global_batch = batch.global_size(),
          .first = index == 0,
          .last = index == count - 1,
          .is_filler = is_filler};
}

// Waits for the whole weights of a segment; those of the next one in `direction` follow while it computes.
void TrainStep::gather(size_t segment, int direction) {
  if (state_.zero->idle()) return;
  const Phase phase(*this, StepPhase::kCommunication, segment);
  state_.zero->gather(segment, direction);
}

void TrainStep::reduce(size_t segment, const MicroStep& micro) {
  if (state_.zero->idle()) return;
  const Phase phase(*this, StepPhase::kCommunication, segment);
  at::NoGradGuard no_grad;
  state_.zero->reduce(segment, micro.first, micro.last);
}

void TrainStep::finish_reductions() {
  if (state_.zero->idle()) return;
  const Phase phase(*this, StepPhase::kCommunication);
  at::NoGradGuard no_grad;
  state_.zero->finish_reductions();
}

// Forward and backward of one micro-batch. The loss is the mean over the global batch, so micro-batches of
// any size add up to it.
void TrainStep::accumulate_gradients(const MicroStep& step, Terms& terms) {
  const auto& segments = denoiser_.segments();
  const StepBatch& micro = step.batch;
  Zero& zero = *state_.zero;
  const NoisedBatch noised = [&] {
    const Phase phase(*this, StepPhase::kInput);
    return objective_.add_noise(micro.x_0, micro.noise, micro.timesteps);
  }();
  const DenoiserInput input{.x_t = noised.x_t,
                            .timesteps = noised.model_t,
                            .class_labels = micro.class_labels,
                            .text_embeds = micro.text_embeds,
                            .text_mask = micro.text_mask};

  std::vector<State> inputs(segments.size());
  std::vector<Edges> outputs(segments.size());
  State state;
  for (size_t i = 0; i < segments.size(); ++i) {
    gather(i, 1);
    const Phase phase(*this, StepPhase::kForward, i);
    const bool keep = options_.memory[i].activations == Activations::kKeep;
    at::AutoGradMode with_graph(keep);
    inputs[i] = detached(std::move(state), keep);
    if (waits_on_host(i)) offload_->store(i, inputs[i].hidden);
    state = segments[i]->forward(inputs[i], input);
    if (keep) outputs[i] = edges_of(state);
    if (waits_on_host(i)) {
      inputs[i].hidden.reset();
      offload_->release(i);
    }
    if (i + 1 < segments.size()) zero.release(i);  // backward begins with the last one
  }

  if (step.last) read_state_ahead();
  std::vector<at::Tensor> grads = prediction_grad(std::exchange(state, {}).hidden, step, noised, terms);
  for (size_t i = segments.size(); i-- > 0;) {
    gather(i, -1);
    if (options_.memory[i].activations != Activations::kKeep) {
      const Phase phase(*this, StepPhase::kRecompute, i);
      at::AutoGradMode with_graph(true);
      if (waits_on_host(i)) inputs[i].hidden = offload_->take(i);
      inputs[i] = detached(std::move(inputs[i]), true);
      State recomputed = segments[i]->forward(inputs[i], input);
      outputs[i] = edges_of(recomputed);
    }
    {
      const Phase phase(*this, StepPhase::kBackward, i);
      if (i > 0 && waits_on_host(i - 1)) offload_->fetch(i - 1);
      const bool adds = zero.begin_gradients(i, step.first);
      backward_segment(i, inputs[i], outputs[i], grads, /*first=*/!adds);
      zero.release(i);
    }
    reduce(i, step);
  }
}

// The loss of a micro-batch, added to `terms`; returns its gradient, scaled for the global batch.
std::vector<at::Tensor> TrainStep::prediction_grad(at::Tensor hidden, const MicroStep& step,
                                                   const NoisedBatch& noised, Terms& terms) {
  const Phase phase(*this, StepPhase::kLoss);
  at::AutoGradMode with_graph(true);
  const size_t last = denoiser_.segments().size() - 1;
  if (waits_on_host(last)) offload_->fetch(last);
  at::Tensor prediction = hidden.detach().set_requires_grad(true);
  hidden.reset();
  const LossTerms loss = objective_.loss(prediction, step.batch.x_0, step.batch.noise, noised);
  if (!step.is_filler) terms.add(loss);
  const double scale =
      step.is_filler ? 0 : state_.loss_scaler.scale() / static_cast<double>(step.global_batch);
  return torch::autograd::grad({loss.loss.sum() * scale}, {prediction});
}

// Turns the gradients of segment `index`'s outputs into those of its inputs, adds its weights' gradients to
// the flat buffer and frees its activations.
void TrainStep::backward_segment(size_t index, State& input, Edges& outputs, std::vector<at::Tensor>& grads,
                                 bool first) {
  TrainingState::SegmentWeights& weights = state_.segments[index];
  Edges roots, leaves;
  std::vector<at::Tensor> root_grads;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined() || !outputs[i].is_valid()) continue;
    roots.push_back(std::move(outputs[i]));
    root_grads.push_back(std::move(grads[i]));
  }
  for (const auto& parameter : weights.parameters) leaves.push_back(leaf_edge(parameter->value));
  const size_t num_weights = leaves.size();
  for (const at::Tensor& tensor : tensors_of(input)) leaves.push_back(leaf_edge(tensor));

  const auto input_grads = torch::autograd::Engine::get_default_engine().execute(
      roots, root_grads, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/false, leaves);
  input = {};
  outputs = {};
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < num_weights; ++i) {
    at::Tensor& flat = weights.grad_views[i];
    if (!input_grads[i].defined()) {
      if (first) flat.zero_();
    } else if (first) {
      flat.copy_(input_grads[i]);
    } else {
      ops::mixed_add_(flat, input_grads[i]);
    }
  }
  grads.assign(input_grads.begin() + static_cast<int64_t>(num_weights), input_grads.end());
}

// This rank's part of it: over its shards, or, where every rank has all gradients, on rank 0 only.
at::Tensor TrainStep::gradient_sum_of_squares() const {
  std::vector<at::Tensor> flat;
  const bool is_first = state_.zero->group().rank() == 0;
  for (const auto& weights : state_.segments)
    if (weights.unit.layout().size > 0 &&
        (weights.unit.sharding().zero_stage > 0 ? state_.zero->counts_shards() : is_first))
      flat.push_back(weights.unit.grad_shard);
  if (flat.empty()) return at::zeros({}, at::TensorOptions().device(options_.device).dtype(at::kDouble));
  return global_sum_of_squares(flat);
}

// Segment by segment. What is on the host or a disk comes one segment ahead.
void TrainStep::update(double lr, double grad_scale) {
  at::NoGradGuard no_grad;
  const OptimizerStep step{.lr = lr, .update = ++state_.updates, .grad_scale = grad_scale};
  bring_state(0);
  for (size_t s = 0; s < state_.segments.size(); ++s) {
    bring_state(s + 1);
    if (state_.segments[s].unit.layout().size > 0) update_unit(s, step);
  }
  state_.zero->read_ahead();
}

// While the last backward computes, the disk brings what the update begins with. A step that is skipped
// leaves it in the buffers for the next one.
void TrainStep::read_state_ahead() {
  if (state_.placement != Placement::kNvme) return;
  const Phase phase(*this, StepPhase::kOffload);
  const size_t count = std::min(state_.segments.size(), state_.nvme->optimizer_state->buffers().size());
  for (size_t s = 0; s < count; ++s) state_.segments[s].unit.prefetch_state();
}

// Begins to bring a segment's optimizer state from the disk, its gradients to the host.
void TrainStep::bring_state(size_t segment) {
  if (state_.placement == Placement::kDevice || segment >= state_.segments.size()) return;
  const FlatUnit& unit = state_.segments[segment].unit;
  if (unit.layout().size == 0) return;
  const Phase phase(*this, StepPhase::kOffload, segment);
  unit.prefetch_state();
  if (exchange_) exchange_->fetch(unit.grad_shard);
}

void TrainStep::update_unit(size_t s, const OptimizerStep& step) {
  FlatUnit& unit = state_.segments[s].unit;
  const bool weights_elsewhere = unit.weight_placement() != Placement::kDevice;
  std::optional<Phase> phase;
  if (state_.placement != Placement::kDevice || weights_elsewhere)
    phase.emplace(*this, StepPhase::kOffload, s);
  StateLease state = unit.lease(Access::kWrite);
  WeightLease home = unit.lease_weights(Access::kOverwrite);
  OptimizerSlice slice{.master = state.master,
                       .grads = exchange_ ? exchange_->take() : unit.grad_shard,
                       .moments = state.moments};
  // From where they are updated to where they are kept, when that is on the other side of the link.
  const bool sends = exchange_ && !weights_elsewhere;
  const bool brings = !exchange_ && weights_elsewhere && has_host_behind(options_.device);
  at::Tensor weights = sends    ? exchange_->weights(unit.shard_size())
                       : brings ? at::empty({unit.shard_size()}, unit.compute_weights.options())
                                : home.shard;
  phase.reset();

  phase.emplace(*this, StepPhase::kOptimizer, s);
  for (size_t i = 0; i < state.emas.size(); ++i)
    slice.emas.push_back(
        {state.emas[i], ema_decay_at(options_.ema_schedule, state_.ema_decays[i], step.update)});
  const bool casts = weights.scalar_type() != at::kFloat;
  if (casts) slice.compute_weights = &weights;
  optimizer_.step(slice, step);
  if (!casts && !weights.is_same(state.master)) weights.copy_(state.master);
  if (sends) exchange_->send(home.shard);
  if (brings) home.shard.copy_(weights, /*non_blocking=*/unit.weight_placement() == Placement::kHost);
  state_.zero->publish(s);
}

StepBatch as_tensors(const Batch& batch, const Objective& objective) {
  const auto view = [](const auto& values, at::IntArrayRef shape, at::ScalarType type) {
    using Element = std::remove_cvref_t<decltype(values[0])>;
    return at::from_blob(const_cast<Element*>(values.data()), shape, at::TensorOptions().dtype(type));
  };
  const std::vector<int64_t> shape{batch.size, batch.channels, batch.height, batch.width};
  StepBatch tensors{.x_0 = view(batch.x_0, shape, at::kFloat),
                    .noise = view(batch.noise, shape, at::kFloat),
                    .timesteps = objective.timesteps(view(batch.time_uniform, {batch.size}, at::kDouble)),
                    .first_row = batch.first_row,
                    .global_batch = batch.global_size};
  if (!batch.class_labels.empty()) tensors.class_labels = view(batch.class_labels, {batch.size}, at::kLong);
  return tensors;
}

StepBatch slice_rows(const StepBatch& batch, int64_t first, int64_t size, at::Device device) {
  const auto slice = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.narrow(0, first, size).to(device, /*non_blocking=*/true) : tensor;
  };
  return {.x_0 = slice(batch.x_0),
          .noise = slice(batch.noise),
          .timesteps = slice(batch.timesteps),
          .class_labels = slice(batch.class_labels),
          .text_embeds = slice(batch.text_embeds),
          .text_mask = slice(batch.text_mask)};
}

}  // namespace kiln
