#include "train/step_batch.h"

#include <algorithm>
#include <type_traits>

#include "core/aten.h"
#include "data/batches.h"

namespace kiln {

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

StepBatch pinned(StepBatch batch) {
  for (at::Tensor* tensor : {&batch.x_0, &batch.noise, &batch.timesteps, &batch.class_labels,
                             &batch.text_embeds, &batch.text_mask})
    if (tensor->defined()) *tensor = tensor->pin_memory();
  return batch;
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

at::Tensor timesteps_at(const Objective& objective, uint64_t seed, int64_t first, int64_t count) {
  const at::Tensor time_uniform = at::empty({count}, at::kDouble);
  for (int64_t i = 0; i < count; ++i) time_uniform.data_ptr<double>()[i] = time_uniform_at(seed, first + i);
  return objective.timesteps(time_uniform);
}

std::vector<double> positions_at(const Objective& objective, uint64_t seed, int64_t first, int64_t count) {
  const at::Tensor positions =
      objective.position(timesteps_at(objective, seed, first, count)).to(at::kDouble).contiguous();
  return {positions.const_data_ptr<double>(), positions.const_data_ptr<double>() + count};
}

int64_t num_micro_steps(const StepBatch& batch, int64_t micro_batch, int64_t world_size) {
  const int64_t most_rows = (batch.global_size() + world_size - 1) / world_size;
  return micro_batch > 0 ? (most_rows + micro_batch - 1) / micro_batch : 1;
}

MicroStep micro_step(const StepBatch& batch, int64_t micro_batch, int64_t index, int64_t count,
                     at::Device device) {
  if (micro_batch == 0) micro_batch = batch.size();
  const int64_t first_row = index * micro_batch;
  const bool is_filler = first_row >= batch.size();
  const int64_t size = is_filler ? 1 : std::min(micro_batch, batch.size() - first_row);
  return {.batch = slice_rows(batch, is_filler ? 0 : first_row, size, device),
          .global_batch = batch.global_size(),
          .first = index == 0,
          .last = index == count - 1,
          .is_filler = is_filler};
}

}  // namespace kiln
