#include "step/training_state.h"

#include "core/aten.h"
#include "models/model.h"
#include "optim/optimizer.h"
#include "parallel/offload/host_memory.h"
#include "parallel/ranks/agreement.h"

namespace kiln {

namespace {

FlatLayout layout_of(const Segment& segment, int64_t alignment) {
  FlatLayout layout{.slots = {}, .size = 0, .alignment = alignment};
  for (const auto& parameter : segment.parameters())
    if (parameter->trainable) layout.add(parameter->key, parameter->value.sizes().vec());
  return layout;
}

at::Tensor first_value_of(const Parameter& parameter, const TrainingStateOptions& options) {
  return options.first_value ? options.first_value(parameter) : parameter.value;
}

// Casts a frozen weight. Weights of convolutions are laid out channels-last, as their activations are.
at::Tensor frozen_value(const at::Tensor& value, at::ScalarType compute_dtype) {
  const at::NoGradGuard no_grad;
  const at::Tensor cast = value.to(compute_dtype);
  return cast.dim() == 4 ? cast.contiguous(at::MemoryFormat::ChannelsLast) : cast;
}

TrainingState::SegmentWeights flatten(const Segment& segment, const FlatLayout& layout,
                                      const FlatUnitOptions& options,
                                      const TrainingStateOptions& state_options) {
  TrainingState::SegmentWeights weights{
      .unit = FlatUnit(segment.name(), layout, options), .parameters = {}, .grad_views = {}};
  for (const auto& parameter : segment.parameters())
    if (parameter->trainable) weights.parameters.push_back(parameter);
  {
    StateLease state = weights.unit.lease(Access::kWrite);
    for (size_t i = 0; i < weights.parameters.size(); ++i) {
      Parameter& parameter = *weights.parameters[i];
      weights.unit.write(state.master, i, first_value_of(parameter, state_options));
      parameter.value = weights.unit.leaf(i);
      weights.grad_views.push_back(weights.unit.view(weights.unit.grads, i));
    }
  }
  weights.unit.refresh_weight_shard();
  weights.unit.start_emas();
  return weights;
}

}  // namespace

TrainingState::TrainingState(const Denoiser& denoiser, const Optimizer& optimizer,
                             const TrainingStateOptions& options)
    : zero(std::make_unique<Zero>(options.group, options.zero)),
      loss_scaler(options.loss_scaler, options.compute_dtype == at::kHalf),
      ema_decays(options.ema_decays),
      seed(options.seed),
      placement(options.offload.on(has_host_behind(options.device))) {
  std::vector<FlatLayout> layouts;
  std::vector<FlatUnitOptions> units_options;
  std::vector<const Segment*> networks;
  for (const auto& segment : denoiser.segments()) networks.push_back(segment.get());
  if (options.head) networks.push_back(options.head);
  for (const Segment* network : networks) {
    const FlatLayout& layout = layouts.emplace_back(layout_of(*network, optimizer.alignment()));
    units_options.push_back({.device = options.device,
                             .compute_dtype = options.compute_dtype,
                             .grad_dtype = options.grad_dtype,
                             .master_dtype = options.master_dtype,
                             .moments = optimizer.state(layout),
                             .num_emas = network == options.head ? 0 : std::ssize(options.ema_decays),
                             .sharding = zero->sharding_of(layout.size),
                             .placement = placement,
                             .nvme_unit = units_options.size()});
  }
  if (placement.uses_disk())
    agree(*options.group, "the space on --nvme-path",
          [&] { nvme = make_nvme_state(*zero, layouts, units_options, options.offload.nvme); });
  for (const Segment* network : networks) {
    FlatUnitOptions& unit_options = units_options[segments.size()];
    unit_options.nvme = nvme;
    segments.push_back(flatten(*network, layouts[segments.size()], unit_options, options));
    segments.back().is_head = network == options.head;
    for (const auto& parameter : network->parameters()) {
      if (parameter->trainable) continue;
      parameter->value = first_value_of(*parameter, options);
      if (parameter->frozen) parameter->value = frozen_value(parameter->value, options.compute_dtype);
      (parameter->frozen ? frozen : constants).push_back(parameter);
    }
  }
  std::vector<FlatUnit*> units;
  units.reserve(segments.size());
  for (SegmentWeights& weights : segments) units.push_back(&weights.unit);
  zero->manage(units, /*num_apart=*/options.head ? 1 : 0);
  offloaded.disk = nvme ? nvme->disk_bytes() : 0;
  if (!placement.has_host) return;
  if (nvme)
    for (const at::Tensor& buffer : nvme->buffers()) offloaded.host += static_cast<int64_t>(buffer.nbytes());
  for (const FlatUnit* unit : units) offloaded.host += unit->host_bytes();
}

std::optional<size_t> TrainingState::head() const {
  if (segments.empty() || !segments.back().is_head) return std::nullopt;
  return segments.size() - 1;
}

}  // namespace kiln
