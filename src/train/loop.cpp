// The order of a run: all stages are checked and fitted to the memory, then trained one after another.
#include "train/loop.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <optional>

#include "core/error.h"
#include "core/stop_signal.h"
#include "core/text/split.h"
#include "parallel/machine.h"
#include "parallel/ranks/agreement.h"
#include "run/option_values.h"
#include "run/stage_options.h"
#include "train/setup.h"
#include "train/stages/stage_loop.h"
#include "train/stages/stages.h"

namespace kiln {

namespace {

void say(const RunContext& context, const std::vector<std::string>& lines) {
  if (context.group->rank() == 0)
    for (const std::string& line : lines) fmt::print("{}\n", line);
}

// Chooses the memory of every stage ahead before anything is trained.
std::vector<StageFit> fit_stages(const StagePlan& plan, const RunContext& context) {
  std::vector<StageFit> fits;
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    const Stage& stage = plan.stages[i];
    StageFit& fit =
        fits.emplace_back(StageFit{.options = stage.options, .predicted = context.predicted, .summary = {}});
    if (!context.fit || i < plan.current) continue;
    try {
      fit = context.fit(stage.options);
    } catch (const Error& error) {
      if (!plan.is_staged()) throw;
      throw Error(fmt::format("{} ({})", error.what(), stage.name));
    }
    if (!fit.summary.empty()) say(context, {(plan.is_staged() ? stage.name + ": " : "") + fit.summary});
  }
  return fits;
}

// Returns what the plan chose for a stage, with the stage's current length and data. The data may have grown
// since.
StageFit fitted(const Stage& stage, const StageFit& fit) {
  StageFit now = fit;
  now.options.max_steps = stage.options.max_steps;
  now.options.data = stage.options.data;
  return now;
}

// Returns how long the later stages will take, in steps of the current one.
double steps_ahead(const StagePlan& plan, const std::vector<StageFit>& fits) {
  const auto step_s = [&](size_t i) {
    const nlohmann::json& predicted = fits[i].predicted;
    return predicted.is_object() ? predicted.value("step_s", 0.0) : 0.0;
  };
  double steps = 0;
  for (size_t i = plan.current + 1; i < plan.stages.size(); ++i) {
    const double now = step_s(plan.current), then = step_s(i);
    steps += static_cast<double>(plan.stages[i].num_steps()) * (now > 0 && then > 0 ? then / now : 1);
  }
  return steps;
}

// Options that may differ between machines: paths of their own copies (the content is compared), and how they
// load.
const std::vector<std::string>& options_of_one_machine() {
  static const std::vector<std::string> names = words_in(
      "data more-data validation-data autoencoder weights nvme-path loader-threads prefetch threads nproc "
      "peak-tflops device evaluate-reference evaluate-net-weights");
  return names;
}

nlohmann::json settings_of(const TrainOptions& options, const std::string& build, at::Device device) {
  // --device may differ between machines, but "auto" may find a GPU on one and none on the other.
  nlohmann::json settings = {{"kiln", build}, {"the device (--device)", device.is_cuda() ? "cuda" : "cpu"}};
  const nlohmann::json all = to_json(options);
  for (const auto& [name, value] : all.items())
    if (std::ranges::find(options_of_one_machine(), name) == options_of_one_machine().end())
      settings["--" + name] = value;
  for (size_t stage = 0; stage < options.stages.size(); ++stage) {
    nlohmann::json keys = to_json(options.stages[stage]);
    for (const std::string& name : options_of_one_machine()) keys.erase(name);
    settings[stage_name(options.stages[stage], stage)] = keys;
  }
  return settings;
}

std::chrono::milliseconds timeout_of(const TrainOptions& options) {
  return std::chrono::milliseconds(std::llround(options.ranks.collective_timeout * 1000));
}

}  // namespace

void train(const TrainOptions& options, const RunContext& context) {
  validate(options);
  const StopSignal stop;
  std::vector<StageFit> fits;
  size_t first_fitted = 0;
  bool is_next = false;
  for (bool goes_on = true; goes_on;) {
    // Planned again before every stage, since its stores may have grown meanwhile.
    const StagePlan plan = plan_stages(options, context.ahead, *context.group);
    // Damaged checkpoints lead back to an earlier stage, or to fewer stages, which were not fitted.
    if (plan.current < first_fitted || plan.stages.size() != fits.size()) fits.clear();
    if (fits.empty()) {
      agree(*context.group, "the stages", [&] { check_stages(plan); });
      fits = fit_stages(plan, context);
      first_fitted = plan.current;
      say(context, plan.changes);
    }
    // The loop outlives an error, so that the other ranks hear of it before anything waits for them.
    std::optional<StageLoop> loop;
    as_rank(*context.group, [&] {
      loop.emplace(plan, fitted(plan.stage(), fits.at(plan.current)), context, stop, is_next,
                   steps_ahead(plan, fits));
      try {
        goes_on = loop->train();
        is_next = loop->has_trained();
      } catch (const std::exception&) {
        loop->keep_checkpoint();
        throw;
      }
    });
  }
}

int64_t ranks_to_launch(const TrainOptions& options) {
  const int64_t num_ranks = ranks_to_launch("train", options.ranks.nproc);
  if (num_ranks > 0) {  // here, so that there is one message and not one from every rank
    validate(options);
    zero_options_of(options, num_ranks);
  }
  return num_ranks;
}

std::shared_ptr<ProcessGroup> join_ranks(const TrainOptions& options, const std::string& build) {
  const Ranks ranks = ranks_from_environment();
  ProcessGroupOptions group_options;
  std::exception_ptr refusal;  // of this rank's options; the others wait to hear of it
  try {
    validate(options);
    group_options = {.device = choose_device(options.compute.device, ranks.local_rank),
                     .timeout = timeout_of(options),
                     .deterministic = options.compute.deterministic};
  } catch (const std::exception&) {
    refusal = std::current_exception();
  }
  std::shared_ptr<ProcessGroup> group = ProcessGroup::connect(ranks, group_options);
  agree(*group, "the options", [&] {
    if (refusal) std::rethrow_exception(refusal);
  });
  require_same_run(*group, options, build, group_options.device);
  return group;
}

void require_same_run(ProcessGroup& group, const TrainOptions& options, const std::string& build,
                      at::Device device) {
  require_same_on_all_ranks(group, settings_of(options, build, device));
}

}  // namespace kiln
