// From one step's memory and time to a whole run.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "core/units.h"
#include "models/registry.h"
#include "plan/ranks/rank_step.h"
#include "plan/ranks/step_time.h"
#include "plan/run/make_plan.h"

namespace kiln {

namespace {

constexpr int64_t kMostScaledGpus = 1024;
constexpr int64_t kSmokeTestSteps = 1000;

double days_of(double images, double images_per_s) { return images / images_per_s / kSecondsPerDay; }

double cost_of(const PlanOptions& options, int64_t gpus, double days) {
  return options.price_per_gpu_hour * static_cast<double>(gpus) * days * 24;
}

std::vector<ScalingPoint> scaling_of(const Plan& plan, const StepTrace& trace) {
  const MachineProfile& machine = plan.machine;
  const int64_t most = machine.network_bytes_per_s > 0 ? kMostScaledGpus : plan.options.gpus;
  std::set<int64_t> counts = {plan.options.gpus};
  for (int64_t gpus = 1; gpus <= most; gpus *= 2) counts.insert(gpus);
  const double images = static_cast<double>(plan.steps * plan.options.train.global_batch);
  std::vector<ScalingPoint> points;
  StepTrace other;  // of the last number of GPUs that is not the plan's
  for (int64_t gpus : counts) {
    Sharding sharding = sharding_of(plan.options.train, gpus, machine);
    if (gpus == 1 && sharding.offload.params == Placement::kDevice) sharding.zero_stage = 0;
    const bool is_own = is_of(trace, sharding);
    if (!is_own && !change_num_ranks(other, sharding))
      other = trace_of_rank(trace, sharding, /*has_checkpoint_part=*/false);
    const StepTime time = time_step(is_own ? trace : other, machine, sharding);
    ScalingPoint point{.gpus = gpus, .step_s = time.seconds + plan.encoding_s};
    point.images_per_s = static_cast<double>(plan.rank_batch * gpus) / point.step_s;
    const double alone = points.empty() ? point.images_per_s : points.front().images_per_s;
    point.efficiency = point.images_per_s / (alone * static_cast<double>(gpus));
    point.days = days_of(images, point.images_per_s);
    point.cost = cost_of(plan.options, gpus, point.days);
    points.push_back(point);
  }
  return points;
}

// Returns "400K" or "7M".
std::string steps_text(int64_t steps) {
  return steps % 1'000'000 == 0 ? fmt::format("{}M", steps / 1'000'000) : fmt::format("{}K", steps / 1000);
}

std::vector<Milestone> milestones_of(const Plan& plan) {
  constexpr int64_t kMilestoneDays[] = {1, 3, 7, 14, 30};
  const int64_t batch = plan.options.train.global_batch;
  const auto steps_of = [&](int64_t images) { return (images + batch - 1) / batch; };
  std::vector<Milestone> milestones = {{.name = "smoke test", .steps = kSmokeTestSteps}};
  const TrainOptions& train = plan.options.train;
  const PublishedTraining published = published_run(train);
  bool has_published = published.steps == 0;
  for (const PublishedQuality& point : family_of(train.model.name).quality) {
    if (train.lora.is_on() || point.steps == 0 || train.model.name != point.model ||
        train.data.image_size != point.image_size)
      continue;
    has_published = has_published || point.steps == published.steps;
    milestones.push_back({.name = fmt::format("published FID {:.4g} without guidance, at {} steps of {}",
                                              point.fid, steps_text(point.steps), point.global_batch),
                          .steps = steps_of(point.steps * point.global_batch)});
  }
  if (!has_published)
    milestones.push_back(
        {.name = published.source, .steps = steps_of(published.steps * published.global_batch)});
  for (const QuotedMilestone& quoted : family_of(train.model.name).quoted)
    if (!train.lora.is_on() && train.model.name.starts_with(quoted.model))
      milestones.push_back({.name = quoted.name, .steps = quoted.steps});
  for (const int64_t days : kMilestoneDays)
    if (static_cast<double>(days) < plan.days)
      milestones.push_back(
          {.name = fmt::format("after {} day{}", days, days > 1 ? "s" : ""),
           .steps = static_cast<int64_t>(static_cast<double>(days) * kSecondsPerDay / plan.step_s)});
  std::ranges::stable_sort(milestones, {}, &Milestone::steps);
  for (Milestone& milestone : milestones) {
    milestone.days = days_of(static_cast<double>(milestone.steps * batch), plan.images_per_s);
    milestone.cost = cost_of(plan.options, plan.options.gpus, milestone.days);
  }
  return milestones;
}

// Returns a line if nobody has published how good the model's pictures are after how many steps.
std::string unknown_quality(const TrainOptions& train) {
  const auto& known = family_of(train.model.name).quality;
  const auto is_of_model = [&](const PublishedQuality& point) {
    return point.steps > 0 && train.model.name == point.model && train.data.image_size == point.image_size;
  };
  if (std::ranges::any_of(known, is_of_model)) return "";
  return fmt::format("how good its pictures are after how many steps: no figure is known for {} at {} px",
                     train.model.name, train.data.image_size);
}

}  // namespace

PublishedTraining published_run(const TrainOptions& options) {
  if (options.lora.is_on()) return {.model = "", .source = ""};  // an adapter's training is different
  for (const PublishedTraining& run : family_of(options.model.name).published) {
    if (!options.model.name.starts_with(run.model)) continue;
    if (run.image_size == 0 || run.image_size == options.data.image_size) return run;
  }
  return {.model = "", .source = ""};
}

std::string quality_text(const TrainOptions& options, int64_t steps) {
  const PublishedQuality* nearest = nullptr;
  for (const PublishedQuality& point : family_of(options.model.name).quality) {
    if (options.model.name != point.model || options.data.image_size != point.image_size) continue;
    if (!nearest || std::abs(point.steps - steps) < std::abs(nearest->steps - steps)) nearest = &point;
  }
  if (!nearest || options.lora.is_on()) return "";
  if (nearest->steps == 0) return fmt::format("{:.2f} MJHQ", nearest->fid);
  return fmt::format("{:.2f} at {}", nearest->fid, steps_text(nearest->steps));
}

void add_outlook(Plan& plan, const StepTrace& trace) {
  const TrainOptions& train = plan.options.train;
  plan.steps = plan.options.steps > 0 ? plan.options.steps : train.max_steps;
  plan.days = days_of(static_cast<double>(plan.steps * train.global_batch), plan.images_per_s);
  plan.gpu_hours = plan.days * 24 * static_cast<double>(plan.options.gpus);
  plan.cost = cost_of(plan.options, plan.options.gpus, plan.days);
  plan.kilowatt_hours = plan.gpu_hours * plan.machine.watts / 1000;
  if (plan.options.has_scaling) plan.scaling = scaling_of(plan, trace);
  plan.milestones = milestones_of(plan);
  if (const std::string unknown = unknown_quality(train); !unknown.empty()) plan.notes.push_back(unknown);

  plan.checkpoint_bytes = trace.checkpoint_bytes;
  const int64_t written = train.checkpoints.every > 0 ? plan.steps / train.checkpoints.every : 1;
  plan.num_checkpoints =
      train.checkpoints.keep > 0 ? std::min(written, train.checkpoints.keep) : std::max<int64_t>(1, written);
}

}  // namespace kiln
