#include "step/step_batch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/aten.h"
#include "core/tensors.h"
#include "data/loader/batches.h"
#include "diffusion/objective.h"

namespace kiln {

namespace {

// Returns where the tensor of an array belongs.
at::Tensor& place_of(const HostArray& array, BatchTensors& tensors) {
  if (array.array == BatchArray::kTimeUniform) return tensors.time_uniform;
  for (const auto& [of, tensor] : StepBatch::kOfSamples)
    if (of == array.array) return tensors.batch.*tensor;
  Conditioning& conditioning = tensors.batch.conditioning;
  switch (array.array) {
    case BatchArray::kClassLabels:
      return conditioning.class_labels;
    case BatchArray::kTextRows:
      return conditioning.text.rows;
    case BatchArray::kTextOffsets:
      return conditioning.text.offsets;
    case BatchArray::kTextDropped:
      return conditioning.text.dropped;
    case BatchArray::kImageHw:
      return conditioning.image_hw;
    case BatchArray::kAspectRatio:
      return conditioning.aspect_ratio;
    default:
      throw std::logic_error(std::string("step: no tensor takes the batch's ") + array.name);
  }
}

}  // namespace

BatchTensors batch_tensors(const BatchShape& shape, const ArrayMaker& make) {
  BatchTensors tensors;
  shape.visit([&](const HostArray& array, auto) {
    place_of(array, tensors) = make(array, to_scalar_type(array.dtype));
  });
  if (shape.has_halo) {
    const auto cut_off = [&](at::Tensor& rows) {
      const at::Tensor halo = rows.narrow(0, shape.rows, 1);
      rows = rows.narrow(0, 0, shape.rows);
      return halo;
    };
    tensors.batch.halo_x_0 = cut_off(tensors.batch.x_0);
    tensors.batch.halo_noise = cut_off(tensors.batch.noise);
  }
  return tensors;
}

void set_timesteps(StepBatch& batch, const at::Tensor& timesteps) {
  const bool has_halo = batch.halo_x_0.defined();
  batch.timesteps = has_halo ? timesteps.narrow(0, 0, batch.size()) : timesteps;
  if (has_halo) batch.halo_timesteps = timesteps.narrow(0, batch.size(), 1);
}

StepBatch as_tensors(const Batch& batch, const Objective& objective) {
  BatchTensors tensors = batch_tensors(batch.shape, [&](const HostArray& array, at::ScalarType dtype) {
    return at::from_blob(const_cast<void*>(batch.data(array.array)), array.sizes,
                         at::TensorOptions().dtype(dtype));
  });
  set_timesteps(tensors.batch, objective.timesteps(tensors.time_uniform));
  tensors.batch.first_row = batch.first_row;
  tensors.batch.first_position = batch.first_position;
  tensors.batch.global_batch = batch.global_size;
  tensors.batch.conditioning.text.host_offsets.assign(batch.text_offsets.begin(), batch.text_offsets.end());
  return tensors.batch;
}

StepBatch pinned(StepBatch batch) {
  batch.visit([](at::Tensor& tensor) { tensor = tensor.pin_memory(); });
  return batch;
}

StepBatch slice_rows(const StepBatch& batch, int64_t first, int64_t size, at::Device device) {
  StepBatch slice;
  for (const auto& [array, tensor] : StepBatch::kOfSamples)
    if ((batch.*tensor).defined())
      slice.*tensor = (batch.*tensor).narrow(0, first, size).to(device, /*non_blocking=*/true);
  const auto before = [&](const at::Tensor& halo, const at::Tensor& rows) {
    if (!halo.defined()) return at::Tensor();
    return (first == 0 ? halo : rows.narrow(0, first - 1, 1)).to(device, /*non_blocking=*/true);
  };
  slice.halo_x_0 = before(batch.halo_x_0, batch.x_0);
  slice.halo_noise = before(batch.halo_noise, batch.noise);
  slice.halo_timesteps = before(batch.halo_timesteps, batch.timesteps);
  slice.conditioning = to_device(slice_rows(batch.conditioning, first, size), device);
  slice.first_position = batch.first_position + first;
  return slice;
}

at::Tensor targets_before(const Objective& objective, const StepBatch& batch, const at::Tensor& targets) {
  const NoisedBatch halo = objective.add_noise(batch.halo_x_0, batch.halo_noise, batch.halo_timesteps);
  return at::cat({halo.target, targets.narrow(0, 0, batch.size() - 1)});
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
