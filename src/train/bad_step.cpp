#include "train/bad_step.h"

#include <fmt/ranges.h>

#include <cmath>

#include "core/aten.h"
#include "step/step_batch.h"

namespace kiln {

std::vector<BatchSample> samples_at(const Objective& objective, uint64_t seed, const SampleOrder& order,
                                    int64_t first, int64_t count) {
  const at::Tensor timesteps = timesteps_at(objective, seed, first, count);
  std::vector<BatchSample> samples;
  samples.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    samples.push_back({order.sample_at(first + i), timesteps[i].item<double>()});
  return samples;
}

BadStepReport bad_step_report(int64_t step, const StepResult& result, const std::vector<BatchSample>& samples,
                              const std::function<std::string(int64_t)>& sample_name) {
  constexpr size_t kMostNamed = 8;
  const bool by_loss = !std::isfinite(result.loss);
  std::vector<int64_t> ids;
  std::vector<double> timesteps;
  std::vector<std::string> named;
  for (size_t i = 0; i < samples.size(); ++i) {
    if (by_loss && std::isfinite(result.losses[i])) continue;
    const auto [id, t] = samples[i];
    ids.push_back(id);
    timesteps.push_back(t);
    if (named.size() < kMostNamed) named.push_back(fmt::format("{} ({}) at t {:g}", id, sample_name(id), t));
  }
  const size_t more = ids.size() - named.size();
  const char* cause = by_loss ? "loss" : "gradient";
  return {.event = {{"event", "skipped"},
                    {"step", step},
                    {"cause", cause},
                    {"sample_ids", ids},
                    {"timesteps", timesteps}},
          .text = fmt::format("step {} skipped, {} is not finite: samples {}{}", step, cause,
                              fmt::join(named, ", "), more > 0 ? fmt::format(" and {} more", more) : "")};
}

}  // namespace kiln
