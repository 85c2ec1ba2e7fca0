#include "train/training_state.h"

#include <ATen/ATen.h>

#include "core/error.h"

namespace kiln {

namespace {

TrainingState::SegmentWeights flatten(const Segment& segment, const Zero& zero, FlatUnitOptions options) {
  FlatLayout layout;
  ParameterList trainable;
  for (const auto& parameter : segment.parameters()) {
    if (!parameter->trainable) continue;
    layout.add(parameter->key, parameter->value.sizes().vec());
    trainable.push_back(parameter);
  }
  options.sharding = zero.sharding_of(layout.size);
  TrainingState::SegmentWeights weights{.unit = FlatUnit(segment.name(), std::move(layout), options),
                                        .parameters = std::move(trainable),
                                        .grad_views = {}};
  for (size_t i = 0; i < weights.parameters.size(); ++i) {
    Parameter& parameter = *weights.parameters[i];
    weights.unit.write(weights.unit.master, i, parameter.value);
    parameter.value = weights.unit.leaf(i);
    weights.grad_views.push_back(weights.unit.view(weights.unit.grads, i));
  }
  weights.unit.refresh_weight_shard();
  weights.unit.start_emas();
  return weights;
}

}  // namespace

TrainingState::TrainingState(const Denoiser& denoiser, const Optimizer& optimizer,
                             const TrainingStateOptions& options)
    : zero(std::make_unique<Zero>(options.group, options.zero)),
      loss_scaler({.enabled = options.compute_dtype == at::kHalf}),
      ema_decays(options.ema_decays) {
  if (options.zero.stage > 0 && optimizer.needs_whole_tensors())
    fail("zero", "this optimizer looks at whole tensors, which --zero-stage {} divides: use --zero-stage 0",
         options.zero.stage);
  const FlatUnitOptions unit_options{.device = options.device,
                                     .compute_dtype = options.compute_dtype,
                                     .grad_dtype = options.grad_dtype,
                                     .num_moments = static_cast<int64_t>(optimizer.moment_names().size()),
                                     .num_emas = static_cast<int64_t>(options.ema_decays.size())};
  for (const auto& segment : denoiser.segments()) {
    segments.push_back(flatten(*segment, *zero, unit_options));
    for (const auto& parameter : segment->parameters())
      if (!parameter->trainable) constants.push_back(parameter);
  }
  std::vector<FlatUnit*> units;
  for (SegmentWeights& weights : segments) units.push_back(&weights.unit);
  zero->manage(units);
}

}  // namespace kiln
