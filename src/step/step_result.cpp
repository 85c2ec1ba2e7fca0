#include "step/step_result.h"

#include <cmath>

#include "core/aten.h"
#include "diffusion/objective.h"
#include "optim/grad_norm.h"
#include "parallel/offload/device_wait.h"
#include "parallel/offload/host_copy.h"
#include "step/step_batch.h"
#include "step/training_state.h"

namespace kiln {

void SampleLosses::add(const LossTerms& of_micro_batch) {
  kinds.resize(1 + of_micro_batch.terms.size());
  kinds[0].push_back(of_micro_batch.loss.detach());
  for (size_t i = 1; i < kinds.size(); ++i) kinds[i].push_back(of_micro_batch.terms[i - 1].detach());
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
  for (const auto& kind : losses.kinds) all.insert(all.end(), kind.begin(), kind.end());
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

constexpr int64_t kNumSignals = 2;
// One number holds how many ranks want to stop and, above that, rank 0's requests.
constexpr int64_t kMoreThanRanks = 1 << 20;

}  // namespace

at::Tensor sum_over_ranks(const at::Tensor& mine, const StepBatch& batch, const RankSignals& signals,
                          ProcessGroup& group) {
  at::Tensor of_ranks = host_empty({kNumSignals}, at::kDouble, mine.device());
  double* values = of_ranks.mutable_data_ptr<double>();
  const bool is_first = group.rank() == 0;
  values[0] =
      static_cast<double>((is_first ? signals.requests * kMoreThanRanks : 0) + (signals.stop ? 1 : 0));
  values[1] = is_first ? signals.clock_seconds : 0;
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

StepResult result_of(const std::vector<double>& of_all_ranks, int64_t global_batch, double loss_scale) {
  StepResult result{.loss_scale = loss_scale};
  if (of_all_ranks.empty()) return result;
  const auto norm = of_all_ranks.end() - 1 - kNumSignals;
  std::vector<double> means;  // of the loss, then of its terms
  for (auto kind = of_all_ranks.begin(); kind != norm; kind += global_batch) {
    double& mean = means.emplace_back(0);
    for (auto loss = kind; loss != kind + global_batch; ++loss)
      mean += *loss / static_cast<double>(global_batch);
  }
  result.losses.assign(of_all_ranks.begin(), of_all_ranks.begin() + global_batch);
  result.loss = means.front();
  result.terms.assign(means.begin() + 1, means.end());
  result.grad_norm = std::sqrt(norm[0]) / loss_scale;
  const auto wishes = static_cast<int64_t>(norm[1]);
  result.signals = {
      .stop = wishes % kMoreThanRanks > 0, .clock_seconds = norm[2], .requests = wishes / kMoreThanRanks};
  return result;
}

}  // namespace kiln
