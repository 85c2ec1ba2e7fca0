#include "step/step_result.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/aten.h"
#include "optim/grad_norm.h"
#include "parallel/offload/device_wait.h"

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

at::Tensor measured(const SampleLosses& losses, const at::Tensor& gradient_sum_of_squares) {
  std::vector<at::Tensor> all;
  for (const auto* list : {&losses.loss, &losses.mse, &losses.vb})
    all.insert(all.end(), list->begin(), list->end());
  all.push_back(gradient_sum_of_squares.reshape({1}));
  return at::cat(all);  // all become f64, as the last one is
}

std::vector<double> wait_for_numbers(const HostRead& numbers, ProcessGroup& group) {
  if (!numbers.is_pending()) return {};
  if (numbers.end()) wait_for(*numbers.end(), group, "a step");
  const at::Tensor& host = numbers.wait();
  return {host.const_data_ptr<double>(), host.const_data_ptr<double>() + host.numel()};
}

namespace {

constexpr int64_t kNumSignals = 2;  // the members of RankSignals

}  // namespace

at::Tensor sum_over_ranks(const at::Tensor& mine, const StepBatch& batch, const RankSignals& signals,
                          ProcessGroup& group) {
  at::Tensor of_ranks = host_empty({kNumSignals}, at::kDouble, mine.device());
  double* values = of_ranks.mutable_data_ptr<double>();
  values[0] = signals.stop ? 1 : 0;
  values[1] = group.rank() == 0 ? signals.clock_seconds : 0;
  of_ranks = sent_to(of_ranks, mine.device());
  // A dry run (plan) leaves out the exchange of losses between ranks, which is a few bytes a row.
  if (!group.sends()) return at::cat({mine, of_ranks});
  const int64_t rows = batch.size(), all_rows = batch.global_size(), num_terms = (mine.numel() - 1) / rows;
  const at::Tensor all_losses = at::zeros({num_terms, all_rows}, mine.options());
  all_losses.narrow(1, batch.first_row, rows)
      .copy_(mine.narrow(0, 0, num_terms * rows).view({num_terms, rows}));
  at::Tensor all = at::cat({all_losses.view({-1}), mine.narrow(0, num_terms * rows, 1), of_ranks});
  group.sum_tensor(all, "losses and gradient norm").wait();
  return all;
}

int64_t place_of_norm(const at::Tensor& of_all_ranks) { return of_all_ranks.numel() - 1 - kNumSignals; }

StepResult result_of(const std::vector<double>& of_all_ranks, const SampleLosses& kinds, int64_t global_batch,
                     double loss_scale) {
  StepResult result{.loss_scale = loss_scale};
  if (of_all_ranks.empty()) return result;
  auto next = of_all_ranks.begin();
  for (auto [list, values] :
       {std::pair{&kinds.loss, &result.losses}, {&kinds.mse, &result.mse}, {&kinds.vb, &result.vb}}) {
    if (list->empty()) continue;
    values->assign(next, next + global_batch);
    next += global_batch;
  }
  for (double loss : result.losses) result.loss += loss / static_cast<double>(global_batch);
  result.grad_norm = std::sqrt(*next++) / loss_scale;
  result.signals.stop = *next++ > 0;
  result.signals.clock_seconds = *next;
  return result;
}

}  // namespace kiln
