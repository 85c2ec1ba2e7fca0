#include "train/step_result.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/aten.h"
#include "optim/grad_norm.h"
#include "parallel/device_wait.h"

namespace kiln {

void SampleLosses::add(const LossTerms& terms) {
  loss.push_back(terms.loss.detach());
  if (terms.mse.defined()) mse.push_back(terms.mse.detach());
  if (terms.vb.defined()) vb.push_back(terms.vb.detach());
}

at::Tensor gradient_sum_of_squares(const TrainingState& state, at::Device device) {
  std::vector<at::Tensor> flat;
  const bool is_first = state.zero->group().rank() == 0;
  for (const auto& weights : state.segments)
    if (weights.unit.layout().size > 0 &&
        (weights.unit.sharding().zero_stage > 0 ? state.zero->counts_shards() : is_first))
      flat.push_back(weights.unit.grad_shard);
  if (flat.empty()) return at::zeros({}, at::TensorOptions().device(device).dtype(at::kDouble));
  return global_sum_of_squares(flat);
}

at::Tensor measured(const SampleLosses& losses, const TrainingState& state, at::Device device) {
  std::vector<at::Tensor> all;
  for (const auto* list : {&losses.loss, &losses.mse, &losses.vb})
    for (const at::Tensor& values : *list) all.push_back(values.to(at::kDouble));
  all.push_back(gradient_sum_of_squares(state, device).reshape({1}));
  return at::cat(all);
}

std::vector<double> read_from_device(const at::Tensor& values, ProcessGroup& group) {
  wait_for_device(values.device(), group, "a step");
  const at::Tensor host = values.cpu();
  return {host.const_data_ptr<double>(), host.const_data_ptr<double>() + host.numel()};
}

std::vector<double> sum_over_ranks(std::vector<double> mine, const StepBatch& batch,
                                   const std::vector<double>& shared, ProcessGroup& group) {
  if (group.world_size() == 1) {
    mine.insert(mine.end(), shared.begin(), shared.end());
    return mine;
  }
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

StepResult result_of(std::vector<double> of_all_ranks, const SampleLosses& kinds, int64_t global_batch,
                     size_t num_shared, double loss_scale) {
  StepResult result{.loss_scale = loss_scale};
  auto next = of_all_ranks.begin();
  for (auto [list, values] :
       {std::pair{&kinds.loss, &result.losses}, {&kinds.mse, &result.mse}, {&kinds.vb, &result.vb}}) {
    if (list->empty()) continue;
    values->assign(next, next + global_batch);
    next += global_batch;
  }
  for (double loss : result.losses) result.loss += loss / static_cast<double>(global_batch);
  result.grad_norm = std::sqrt(*next++) / loss_scale;
  result.shared.assign(next, next + static_cast<int64_t>(num_shared));
  return result;
}

}  // namespace kiln
