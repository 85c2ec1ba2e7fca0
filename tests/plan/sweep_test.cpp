// A plan for every name of the registry, at each published size, on every built-in GPU and the CPU, in every
// dtype that they multiply in, whole and with an adapter. What every plan must have, and the worst of what
// they have, as a table. KILN_FULL=1 plans every combination; else each model, size, GPU, dtype and way
// comes, most pairs of them too.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <set>

#include "core/tensors.h"
#include "models/registry.h"
#include "plan/plan_settings.h"
#include "plan/search/comparison.h"
#include "test_files.h"

namespace kiln {
namespace {

constexpr int64_t kBatch = 8, kLoraRank = 16;

// A run that is planned on several machines.
struct Run {
  std::string model;
  int64_t image_size = 0;  // 0: left open, so that it is the preset's own
  at::ScalarType dtype = at::kFloat;
  bool with_adapter = false;

  std::string text() const {
    return fmt::format("{} at {}, {}{}", model,
                       image_size > 0 ? fmt::format("{} px", image_size) : "its own size", choice_name(dtype),
                       with_adapter ? ", adapter" : "");
  }
};

// The preset's own first.
std::vector<int64_t> published_sizes(const std::string& model) {
  std::set<int64_t> others;
  for (const PublishedTraining& run : family_of(model).published)
    if (run.image_size > 0 && run.image_size != own_image_size(model) && model.starts_with(run.model))
      others.insert(run.image_size);
  std::vector<int64_t> sizes = {0};
  sizes.insert(sizes.end(), others.begin(), others.end());
  return sizes;
}

PlanOptions options_of(const Run& run, const std::string& gpu) {
  nlohmann::json settings = {
      {"model", run.model}, {"global-batch", kBatch}, {"compute-dtype", choice_name(run.dtype)}};
  std::set<std::string> given;
  if (run.image_size > 0) {
    settings["image-size"] = run.image_size;
    given.insert("image-size");
  }
  if (run.with_adapter) settings["lora-rank"] = kLoraRank;
  if (gpu == "cpu" && run.dtype == at::kFloat8_e4m3fn) settings["emulate-fp8"] = true;
  PlanOptions options = test::plan_options(gpu, 1, settings);
  options.train = as_published(options.train, given);
  return options;
}

// The plans of one run. Its step is the same on all GPUs.
class RunPlans {
 public:
  explicit RunPlans(const Run& run) : run_(run) {}

  Plan on(const std::string& gpu) {
    const PlanOptions options = options_of(run_, gpu);
    MachineProfile machine = planned_machine(options);
    machine.network_bytes_per_s = 0;  // or each plan would be made for ten other numbers of GPUs as well
    check_plan(options, machine);
    const auto traced = [&](const DataShape& shape) -> const StepTrace& {
      const auto key = std::pair(machine.device, shape.text.max_rows);
      const auto known = traces_.find(key);
      if (known != traces_.end()) return known->second;
      return traces_.emplace(key, trace_step(options.train, shape, machine.device)).first->second;
    };
    return plan_traced(options, machine, read_data_outlook(options), traced);
  }

 private:
  Run run_;
  std::map<std::pair<DryRunDevice, int64_t>, StepTrace> traces_;
};

double seconds_of(const Plan& plan, StepPhase phase) { return plan.phase_s[static_cast<size_t>(phase)]; }

// Returns the most over the step: at the peak of all memory, which scratch and temporaries move, devices hold
// other shares of their activations.
double activations_of(const Plan& plan) {
  int64_t most = 0;
  for (const MemoryCurve::Point& point : plan.curve.points)
    if (const auto found = point.by_kind.find("activations"); found != point.by_kind.end())
      most = std::max(most, found->second);
  return static_cast<double>(most);
}

// An exception: DiT-B/8 has 16 tokens, so 8 images are one row of cuBLAS's tiles. Its forward products then
// fill few multiprocessors for the whole length of k, while those of weights' gradients fill all for k = 128.
// Returns backward / forward of a block's products by their waves of tiles of 128 x 128, with k cut down to
// 512.
double ratio_in_one_row_of_tiles(double width, double num_processors) {
  const auto seconds = [&](double m, double n, double k) {  // in units of one k of one wave
    const double tiles = std::ceil(m / 128) * std::ceil(n / 128);
    double waves = std::ceil(tiles / num_processors);
    for (double splits = 2; splits <= std::min(16., k / 512); ++splits)
      waves = std::min(waves, std::ceil(tiles * splits / num_processors) / splits);
    return waves * k;
  };
  double forward = 0, backward = 0;
  const double rows = 16 * kBatch;
  for (const auto& [m, out, in] : {std::tuple{rows, 3., 1.},
                                   {rows, 1., 1.},
                                   {rows, 4., 1.},
                                   {rows, 1., 4.},
                                   {double{kBatch}, 6., 1.}}) {  // qkv, projection, MLP, adaLN
    forward += seconds(m, out * width, in * width);
    backward += seconds(m, in * width, out * width) + seconds(out * width, in * width, m);
  }
  return backward / forward;
}

// The least and the largest of a figure, and where they come.
struct Range {
  double least = 1e300, most = -1e300;
  std::string at_least, at_most;

  void add(double value, const std::string& where) {
    if (value < least) least = value, at_least = where;
    if (value > most) most = value, at_most = where;
  }
  std::string text(const char* format) const {
    if (at_most.empty()) return "- | - |";
    return fmt::format("{}, {} | {}, {} |", fmt::format(fmt::runtime(format), least), at_least,
                       fmt::format(fmt::runtime(format), most), at_most);
  }
};

struct FamilyFigures {
  int64_t plans = 0;
  Range share, whole, adapter, activations;
};

class Sweep {
 public:
  void plan_run(const Run& run, const std::vector<std::string>& gpus) {
    RunPlans plans(run);
    FamilyFigures& figures = families_[family_of(run.model).name];
    const Plan on_cpu = plans.on("cpu");
    check(run, on_cpu, figures);
    for (const std::string& gpu : gpus) {
      const Plan plan = plans.on(gpu);
      check(run, plan, figures);
      const double ratio = activations_of(plan) / activations_of(on_cpu);
      figures.activations.add(ratio, run.text());
      EXPECT_NEAR(ratio, 1, 0.05) << run.text() << ": activations on " << gpu << " against a CPU's";
    }
  }

  std::string table() const {
    std::string text =
        "| family | plans | least share of peak | most | least backward / forward, all weights | most | "
        "least with "
        "an adapter | most | least activations, GPU / CPU | most "
        "|\n|---|---|---|---|---|---|---|---|---|---|\n";
    for (const auto& [family, figures] : families_)
      text += fmt::format("| {} | {} | {} {} {} {}\n", family, figures.plans, figures.share.text("{:.2f}"),
                          figures.whole.text("{:.2f}"), figures.adapter.text("{:.2f}"),
                          figures.activations.text("{:.3f}"));
    return text;
  }

 private:
  static void check(const Run& run, const Plan& plan, FamilyFigures& figures) {
    const std::string where = run.text() + " on " + plan.machine.name;
    ++figures.plans;
    EXPECT_EQ(plan.peak_share.problem, "") << where;
    EXPECT_GT(plan.peak_share.of_profile, 0) << where;
    figures.share.add(plan.peak_share.of_profile, where);
    const double ratio = seconds_of(plan, StepPhase::kBackward) / seconds_of(plan, StepPhase::kForward);
    (run.with_adapter ? figures.adapter : figures.whole).add(ratio, where);
    double least = run.with_adapter ? 0.8 : 1.2;
    if (run.model == "DiT-B/8" && !run.with_adapter && plan.machine.name != "cpu")
      least =
          std::min(least, ratio_in_one_row_of_tiles(768, static_cast<double>(plan.machine.num_processors)));
    EXPECT_GE(ratio, least) << where;
    EXPECT_LE(ratio, 4) << where;
    check_data(run, plan, where);
  }

  // The latents are as large as the preset's, unless the run says otherwise. A store and what is read of it
  // have the text features of the model, where it takes captions.
  static void check_data(const Run& run, const Plan& plan, const std::string& where) {
    const DenoiserShape shape = build_denoiser(run.model, {}, {.outline = true})->shape();
    const int64_t downsample = family_of(run.model).latents.downsample;
    const int64_t image_size = run.image_size > 0 ? run.image_size : shape.input_size * downsample;
    EXPECT_EQ(plan.options.train.data.image_size, image_size) << where;
    EXPECT_EQ(plan.data.side(), image_size / downsample) << where;
    const DataPlan& samples = plan.samples;
    const auto latent_values = static_cast<double>(plan.data.channels * plan.data.side() * plan.data.side());
    EXPECT_EQ(static_cast<double>(samples.latent_bytes),
              static_cast<double>(samples.num_samples) * 2 * 4 * latent_values)
        << where << ": means and variances in f32";
    const double caption_bytes =
        2 * plan.data.text.mean_rows * static_cast<double>(shape.conditioning.text_width);
    EXPECT_EQ(samples.text_bytes > 0, shape.conditioning.takes_text()) << where;
    EXPECT_NEAR(static_cast<double>(samples.text_bytes),
                static_cast<double>(samples.num_samples) * caption_bytes, 1)
        << where;
    const DataOptions& data = plan.options.train.data;
    const double read =
        (data.draw_posterior ? 2 : 1) * 4 * latent_values + (1 - data.text_dropout_prob) * caption_bytes;
    EXPECT_NEAR(plan.data_rate.bytes_per_s, plan.data_rate.images_per_s * read,
                1e-9 * plan.data_rate.bytes_per_s)
        << where;
    EXPECT_EQ(samples.disk_bytes(), samples.latent_bytes + samples.text_bytes) << where;
  }

  std::map<std::string, FamilyFigures> families_;
};

// A model that imitates guidance is made by distillation, which Kiln does not do: it is drawn with and
// converted.
bool is_distilled(const std::string& model) {
  return build_denoiser(model, {}, {.outline = true})->shape().conditioning.takes_guidance;
}

std::vector<std::string> gpus_with(at::ScalarType dtype) {
  std::vector<std::string> names;
  for (const MachineProfile& machine : builtin_profiles())
    if (machine.peak_flops.contains(dtype)) names.push_back(machine.name);
  return names;
}

constexpr at::ScalarType kDtypes[] = {at::kBFloat16, at::kFloat, at::kHalf, at::kFloat8_e4m3fn};

std::vector<std::string> names_of_the_program() {
  std::vector<std::string> names = denoiser_names();
  std::erase_if(names, [](const std::string& name) { return name.starts_with("toy-"); });  // other tests'
  return names;
}

TEST(Sweep, PlansEveryNameOfTheRegistry) {
  const bool full = std::getenv("KILN_FULL") != nullptr;
  Sweep sweep;
  size_t number = 0;
  for (const std::string& model : names_of_the_program()) {
    if (is_distilled(model)) {
      EXPECT_ERROR(RunPlans({model}).on("H100"), "guidance is missing");
      continue;
    }
    for (const int64_t image_size : published_sizes(model)) {
      SCOPED_TRACE(model);
      for (size_t dtype = 0; dtype < std::size(kDtypes); ++dtype)
        for (const bool with_adapter : {false, true}) {
          const bool is_covering = dtype == number % 4 && with_adapter == (number / 4 % 2 == 1);
          if (!full && !is_covering) continue;
          std::vector<std::string> gpus = gpus_with(kDtypes[dtype]);
          // Of a covering set each run has three GPUs, the next run the next three.
          std::ranges::rotate(gpus, gpus.begin() + static_cast<int64_t>(3 * number % gpus.size()));
          if (!full) gpus.resize(3);
          sweep.plan_run({model, image_size, kDtypes[dtype], with_adapter}, gpus);
        }
      ++number;
    }
  }
  fmt::print("{}", sweep.table());
}

}  // namespace
}  // namespace kiln
