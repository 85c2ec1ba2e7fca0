#include "train/checkpoints.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "checkpoint/tensor_files.h"
#include "core/aten.h"
#include "core/error.h"
#include "models/weights.h"
#include "parallel/ranks/agreement.h"
#include "train/checkpoint_files.h"
#include "train/checkpoint_saver.h"

namespace kiln {

namespace {

// The tensors of a mapped file. Only what is copied from it is read.
struct MappedTensors {
  explicit MappedTensors(const std::string& file) : path(file), tensors(load_tensors(file)) {}

  const at::Tensor& find(const std::string& key, const std::vector<int64_t>& shape) const {
    const auto found = tensors.find(key);
    if (found == tensors.end())
      fail("resume", "{} lacks {}: delete this checkpoint to resume from the one before", path, key);
    if (found->second.sizes() != at::IntArrayRef(shape))
      fail("resume", "{} has {} of shape [{}], expected [{}]: it belongs to another model", path, key,
           fmt::join(found->second.sizes(), ", "), fmt::join(shape, ", "));
    return found->second;
  }

  std::string path;
  std::map<std::string, at::Tensor> tensors;
};

void load_state(const std::string& folder, TrainingState& state) {
  at::NoGradGuard no_grad;
  const MappedTensors model(folder + "/" + kModelFile), moments(folder + "/" + kOptimizerFile);
  std::vector<MappedTensors> emas;
  for (size_t e = 0; e < state.ema_decays.size(); ++e)
    emas.emplace_back(folder + "/" + ema_file_name(state.ema_decays, e));
  std::optional<MappedTensors> head;
  if (state.head()) head.emplace(folder + "/" + kHeadFile);
  for (auto& weights : state.segments) {
    FlatUnit& unit = weights.unit;
    {
      StateLease lease = unit.lease(Access::kWrite);
      for (size_t i = 0; i < unit.layout().slots.size(); ++i) {
        const FlatSlot& slot = unit.layout().slots[i];
        unit.write(lease.master, i, (weights.is_head ? *head : model).find(slot.key, slot.shape));
        for (size_t e = 0; e < lease.emas.size(); ++e)
          unit.write(lease.emas[e], i, emas[e].find(slot.key, slot.shape));
        for (size_t m = 0; m < lease.moments.size(); ++m) {
          const StateBuffer& buffer = unit.moment_buffers()[m];
          if (const StateSlot kept = buffer.slot(unit.layout(), i); kept.values > 0)
            unit.write_moment(lease, m, i, moments.find(moment_key(buffer.name, slot.key), kept.shape));
        }
      }
    }
    unit.refresh_weight_shard();
  }
}

}  // namespace

void copy_weights(const TrainingState& state, WeightsKind kind, size_t ema_index, const Denoiser& to) {
  at::NoGradGuard no_grad;
  state.zero->finish_gathers();
  for (size_t s = 0; s < to.segments().size(); ++s) {
    const FlatUnit& unit = state.segments[s].unit;
    const ParameterList& parameters = to.segments()[s]->parameters();
    const StateLease lease = unit.lease(Access::kRead);
    const at::Tensor whole =
        state.zero->whole(s, kind == WeightsKind::kMaster ? lease.master : lease.emas.at(ema_index));
    std::map<std::string, at::Tensor> named;
    for (size_t i = 0; i < unit.layout().slots.size(); ++i)
      named[unit.layout().slots[i].key] = unit.view(whole, i);
    for (const auto* untrained : {&state.constants, &state.frozen})
      for (const auto& constant : *untrained)
        if (std::ranges::any_of(parameters, [&](const auto& p) { return p->key == constant->key; }))
          named[constant->key] = constant->value.detach();
    load_weights(parameters, named, "the run's state");
  }
}

std::string save_checkpoint(const std::string& run, const TrainingState& state, TrainStateInfo info) {
  CheckpointSaver saver(run, state, CheckpointCopy::kPageCache);
  saver.begin(std::move(info));
  return saver.finish();
}

TrainStateInfo load_checkpoint(const std::string& folder, TrainingState& state) {
  ProcessGroup& group = state.zero->group();
  state.zero->finish_gathers();
  TrainStateInfo info;
  agree(group, "a checkpoint", [&] {
    info = read_train_state(folder);
    load_state(folder, state);
  });
  for (size_t s = 0; s < state.segments.size(); ++s) state.zero->publish(s);
  state.updates = info.updates;
  state.loss_scaler.restore(info.loss_scale, info.scaler_good_steps, info.scaler_overflows);
  return info;
}

}  // namespace kiln
