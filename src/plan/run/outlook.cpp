// From one step's memory and time to a whole run.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "core/dtype.h"
#include "core/units.h"
#include "data/images/image_dataset.h"
#include "data/store/feature_store.h"
#include "models/registry.h"
#include "plan/ranks/rank_step.h"
#include "plan/ranks/step_time.h"
#include "plan/run/make_plan.h"
#include "plan/trace/planned_data.h"
#include "train/store_data.h"

namespace kiln {

namespace {

constexpr int64_t kImageNetImages = 1'281'167;
constexpr int64_t kMostScaledGpus = 1024;
// Normal draws, posterior included, of one loader thread (benchmarks/results/store_*): latent values per
// second.
constexpr double kLoaderValuesPerS = 107'000 * 4096.0;
constexpr int64_t kSmokeTestSteps = 1000;
constexpr int64_t kUsefulImages = 25'600'000;  // 20 epochs of ImageNet: objects and classes are recognisable

struct StoreSize {
  int64_t num_samples = 0, bytes = 0;
  double bytes_per_read = 0;  // of one sample of a step
};

StoreSize size_of_store(const PlanOptions& options, const DataShape& data) {
  const int64_t latent = data.channels * data.largest().area();
  const std::string& path = options.train.data.path;
  StoreInfo info;  // as kiln extract writes one: f32, mean and logvar
  info.num_samples = kImageNetImages;
  info.has_logvar = !options.train.data.in_pixels();
  if (is_store(options.train))
    info = read_sources_info(sources_of(options.train));
  else if (!path.empty() && path != "synthetic" && options.dataset_size == 0)
    info.num_samples = static_cast<int64_t>(ImageDataset::open(path)->records().size());
  if (options.dataset_size > 0) info.num_samples = options.dataset_size;

  const double arrays = info.has_logvar ? 2 : 1,
               read = info.has_logvar && options.train.data.draw_posterior ? 2 : 1;
  const double array_bytes = static_cast<double>(latent) * static_cast<double>(dtype_size(info.dtype));
  return {.num_samples = info.num_samples,
          .bytes = static_cast<int64_t>(static_cast<double>(info.num_samples * info.num_flips) * arrays *
                                        array_bytes),
          .bytes_per_read = read * array_bytes};
}

double days_of(double images, double images_per_s) { return images / images_per_s / kSecondsPerDay; }

double cost_of(const PlanOptions& options, int64_t gpus, double days) {
  return options.price_per_gpu_hour * static_cast<double>(gpus) * days * 24;
}

std::vector<ScalingPoint> scaling_of(const Plan& plan, const StepTrace& trace) {
  const MachineProfile& machine = plan.machine;
  const int64_t most =
      machine.node_bytes_per_s > 0 ? kMostScaledGpus : std::max(machine.gpus_per_node, plan.options.gpus);
  std::set<int64_t> counts = {plan.options.gpus};
  for (int64_t gpus = 1; gpus <= most; gpus *= 2) counts.insert(gpus);
  const double images = static_cast<double>(plan.steps * plan.options.train.global_batch);
  std::vector<ScalingPoint> points;
  for (int64_t gpus : counts) {
    Sharding sharding = sharding_of(plan.options.train, gpus, machine);
    if (gpus == 1 && sharding.offload_params == Placement::kDevice) sharding.zero_stage = 0;
    const StepTime time =
        time_step(is_of(trace, sharding) ? trace : trace_of_rank(trace, sharding), machine, sharding);
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

std::vector<Milestone> milestones_of(const Plan& plan) {
  constexpr int64_t kMilestoneDays[] = {1, 3, 7, 14, 30};
  const int64_t batch = plan.options.train.global_batch;
  const auto steps_of = [&](int64_t images) { return (images + batch - 1) / batch; };
  std::vector<Milestone> milestones = {{.name = "smoke test", .steps = kSmokeTestSteps}};
  if (plan.data.text.width == 0)
    milestones.push_back({.name = "first useful samples", .steps = steps_of(kUsefulImages)});
  const TrainOptions& train = plan.options.train;
  const PublishedTraining published = published_run(train);
  bool has_published = published.steps == 0;
  for (const PublishedQuality& point : family_of(train.model.name).quality) {
    if (train.lora.is_on() || train.model.name != point.model || train.data.image_size != point.image_size)
      continue;
    has_published = has_published || point.steps == published.steps;
    milestones.push_back(
        {.name = fmt::format("published FID {:.4g} without guidance, at {}{} steps of {}", point.fid,
                             point.steps % 1'000'000 == 0 ? point.steps / 1'000'000 : point.steps / 1000,
                             point.steps % 1'000'000 == 0 ? "M" : "K", point.global_batch),
         .steps = steps_of(point.steps * point.global_batch)});
  }
  if (!has_published)
    milestones.push_back(
        {.name = published.source, .steps = steps_of(published.steps * published.global_batch)});
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
    return train.model.name == point.model && train.data.image_size == point.image_size;
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

void add_outlook(Plan& plan, const StepTrace& trace) {
  const TrainOptions& train = plan.options.train;
  plan.steps = plan.options.steps > 0 ? plan.options.steps : train.max_steps;
  plan.days = days_of(static_cast<double>(plan.steps * train.global_batch), plan.images_per_s);
  plan.gpu_hours = plan.days * 24 * static_cast<double>(plan.options.gpus);
  plan.cost = cost_of(plan.options, plan.options.gpus, plan.days);
  plan.kilowatt_hours = plan.gpu_hours * plan.machine.watts / 1000;
  plan.scaling = scaling_of(plan, trace);
  plan.milestones = milestones_of(plan);
  if (const std::string unknown = unknown_quality(train); !unknown.empty()) plan.notes.push_back(unknown);

  const StoreSize store = size_of_store(plan.options, plan.data);
  plan.dataset_size = store.num_samples;
  plan.store_bytes = store.bytes;
  plan.checkpoint_bytes = trace.checkpoint_bytes;
  const int64_t written = train.checkpoints.every > 0 ? plan.steps / train.checkpoints.every : 1;
  plan.num_checkpoints =
      train.checkpoints.keep > 0 ? std::min(written, train.checkpoints.keep) : std::max<int64_t>(1, written);

  const int64_t ranks_here = std::min(plan.options.gpus, plan.machine.gpus_per_node);
  const double share = static_cast<double>(ranks_here) / static_cast<double>(plan.options.gpus);
  const double values = static_cast<double>(plan.data.channels * plan.data.largest().area());
  plan.data_rate = {.images_per_s = share * plan.images_per_s,
                    .bytes_per_s = share * plan.images_per_s * store.bytes_per_read,
                    .disk_bytes_per_s = plan.machine.disk_bytes_per_s,
                    .loader_images_per_s = static_cast<double>(train.data.loader_threads * ranks_here) *
                                           kLoaderValuesPerS / values};
}

}  // namespace kiln
