#include "plan/trace/ideal_step.h"

#include <set>

#include "core/aten.h"
#include "core/dry_run.h"
#include "models/registry.h"
#include "plan/trace/trace.h"

namespace kiln {

namespace {

// Returns the bytes of a unit's state on the device. Buffers that share their memory count once.
double state_bytes_of(const FlatUnit& unit) {
  std::set<const void*> seen;
  double bytes = 0;
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_meta() && seen.insert(tensor.storage().unsafeGetStorageImpl()).second)
      bytes += static_cast<double>(tensor.numel() * tensor.element_size());
  };
  for (const at::Tensor& tensor : {unit.compute_weights, unit.grads, unit.master}) add(tensor);
  for (const auto* tensors : {&unit.moments, &unit.emas})
    for (const at::Tensor& tensor : *tensors) add(tensor);
  return bytes;
}

double frozen_bytes_of(const Segment& segment) {
  double bytes = 0;
  for (const auto& parameter : segment.parameters())
    if (parameter->frozen) bytes += static_cast<double>(parameter->value.nbytes());
  return bytes;
}

}  // namespace

std::vector<IdealSegment> ideal_step(const TrainOptions& options, const DataShape& data, int64_t world_size) {
  const DryRunScope dry_run(DryRunDevice::kCpu);
  const Training training = build_training(options, data, at::kMeta, dry_group(world_size));
  const at::ScalarType held = options.compute.held_dtype();
  const auto definition = build_denoiser(options.model.name, training.model_config, {.device = at::kMeta});
  ImageExtent image = largest_extent(data);
  if (!data.text.is_padded) image.text_rows = data.text.mean_rows;
  const std::vector<SegmentWork> work = forward_work(*definition, image, held);
  const auto rows = static_cast<double>(rank_rows(options.global_batch, world_size - 1, world_size).count);
  const double passes = training.lora.empty() ? 3 : 2;
  std::vector<IdealSegment> segments;
  for (const auto& state : training.state->segments) {
    IdealSegment& segment = segments.emplace_back(
        IdealSegment{.name = state.unit.name(), .bytes = 2 * state_bytes_of(state.unit)});
    if (state.is_head) continue;
    const size_t i = segments.size() - 1;
    segment.flops = passes * rows * work[i].flops;
    segment.bytes += 2 * rows * work[i].kept_bytes + frozen_bytes_of(*training.denoiser->segments()[i]);
  }
  return segments;
}

}  // namespace kiln
