#include "train/checkpoints.h"

#include <ATen/ATen.h>

#include "checkpoint/tensor_files.h"
#include "core/error.h"

namespace kiln {

namespace {

using TensorMap = std::map<std::string, at::Tensor>;

std::string moment_key(const std::string& moment, const std::string& key) { return moment + "." + key; }

const at::Tensor& find_tensor(const TensorMap& tensors, const std::string& key, const std::string& path) {
  const auto found = tensors.find(key);
  if (found == tensors.end())
    fail("resume", "{} lacks {}: delete this checkpoint to resume from the one before", path, key);
  return found->second;
}

// The buffer that `weights` of `kind` are in.
const at::Tensor& buffer_of(const FlatUnit& unit, WeightsKind kind, size_t ema_index) {
  return kind == WeightsKind::kMaster ? unit.master : unit.emas.at(ema_index);
}

void load_buffer(const std::string& path, TrainingState& state, WeightsKind kind, size_t ema_index) {
  const TensorMap tensors = load_tensors(path);
  for (auto& weights : state.segments) {
    at::Tensor buffer = buffer_of(weights.unit, kind, ema_index);
    for (size_t i = 0; i < weights.parameters.size(); ++i)
      weights.unit.write(buffer, i, find_tensor(tensors, weights.parameters[i]->key, path));
  }
}

}  // namespace

TensorMap named_weights(const TrainingState& state, WeightsKind kind, size_t ema_index) {
  TensorMap named;
  for (const auto& weights : state.segments)
    for (size_t i = 0; i < weights.parameters.size(); ++i)
      named[weights.parameters[i]->key] =
          weights.unit.view(buffer_of(weights.unit, kind, ema_index), i).to(at::kCPU);
  for (const auto& constant : state.constants)
    named[constant->key] = constant->value.detach().to(at::kCPU, at::kFloat);
  return named;
}

std::string save_checkpoint(const std::string& run, const TrainingState& state, const Optimizer& optimizer,
                            TrainStateInfo info) {
  CheckpointWriter writer(run, info.step);
  save_tensors(writer.folder() + "/model.safetensors", named_weights(state, WeightsKind::kMaster));
  for (size_t e = 0; e < state.ema_decays.size(); ++e)
    save_tensors(writer.folder() + "/" + ema_file_name(state.ema_decays, e),
                 named_weights(state, WeightsKind::kEma, e));
  TensorMap moments;
  const auto names = optimizer.moment_names();
  for (const auto& weights : state.segments)
    for (size_t m = 0; m < names.size(); ++m)
      for (size_t i = 0; i < weights.parameters.size(); ++i)
        moments[moment_key(names[m], weights.parameters[i]->key)] =
            weights.unit.view(weights.unit.moments[m], i).to(at::kCPU);
  save_tensors(writer.folder() + "/" + optimizer_file_name(0, 1), moments);
  info.updates = state.updates;
  info.loss_scale = state.loss_scaler.scale();
  info.scaler_good_steps = state.loss_scaler.good_steps();
  return writer.commit(info);
}

TrainStateInfo load_checkpoint(const std::string& folder, TrainingState& state, const Optimizer& optimizer) {
  const TrainStateInfo info = read_train_state(folder);
  load_buffer(folder + "/model.safetensors", state, WeightsKind::kMaster, 0);
  for (size_t e = 0; e < state.ema_decays.size(); ++e)
    load_buffer(folder + "/" + ema_file_name(state.ema_decays, e), state, WeightsKind::kEma, e);
  const std::string path = folder + "/" + optimizer_file_name(0, 1);
  const TensorMap moments = load_tensors(path);
  const auto names = optimizer.moment_names();
  for (auto& weights : state.segments) {
    for (size_t m = 0; m < names.size(); ++m)
      for (size_t i = 0; i < weights.parameters.size(); ++i)
        weights.unit.write(weights.unit.moments[m], i,
                           find_tensor(moments, moment_key(names[m], weights.parameters[i]->key), path));
    weights.unit.refresh_weight_shard();
  }
  state.updates = info.updates;
  state.loss_scaler.restore(info.loss_scale, info.scaler_good_steps);
  return info;
}

}  // namespace kiln
