#include "cli/probe.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/error.h"
#include "core/tensors.h"
#include "core/units.h"
#include "parallel/machine.h"
#include "plan/price/this_machine.h"
#include "plan/run/make_plan.h"
#include "watch/prediction.h"

namespace kiln::cli {

namespace {

using Json = nlohmann::json;

constexpr double kWorthwhile = 1.02;       // how many times as fast a step must become for a change
constexpr double kCheckpointShare = 0.01;  // of the time that checkpoints may take unmentioned

Json line(const char* about, std::optional<double> gain, std::string text) {
  Json advice = {{"about", about}, {"text", std::move(text)}};
  if (gain) advice["gain"] = *gain;
  return advice;
}

std::string times_text(double gain) { return fmt::format("{} times as fast", number_text(gain, 3)); }

Json on_loader(const StepFigures& measured, const ProbedRun& run) {
  const double gain = 1 / (1 - std::min(measured.stall_share, 0.99));
  const std::string waits =
      fmt::format("the step waits {:.1f} % of the time for data", 100 * measured.stall_share);
  if (gain < kWorthwhile) return line("loader", gain, waits + ": nothing to gain (measured)");
  return line("loader", gain,
              fmt::format("{}, without that it is {} (measured): {}, or kiln extract where --data are "
                          "pictures",
                          waits, times_text(gain),
                          run.change("loader-threads", std::to_string(2 * run.options.data.loader_threads))));
}

// Returns "1.4 times as fast, with 2.1 GiB less memory (planned)".
std::string change_text(const Plan& now, const Plan& then) {
  const int64_t less = now.needed_bytes - then.needed_bytes;
  return fmt::format("{}, with {} GiB {} memory (planned)", times_text(now.step_s / then.step_s),
                     gib_text(std::abs(less)), less >= 0 ? "less" : "more");
}

Json on_precision(const Plan& now) {
  const ComputeOptions& compute = now.options.train.compute;
  if (compute.dtype != at::kFloat)
    return line("precision", std::nullopt,
                fmt::format("{} already, which keeps what needs f32 in f32: nothing to gain",
                            choice_name(compute.dtype)));
  PlanOptions options = now.options;
  options.train.compute.dtype = half_dtype_of(now.machine);
  const Plan half = make_plan(options);
  const std::string change = options.change("compute-dtype", choice_name(options.train.compute.dtype));
  const double gain = now.step_s / half.step_s;
  return line("precision", gain,
              gain >= kWorthwhile
                  ? fmt::format("{}: {}", change, change_text(now, half))
                  : fmt::format("f32 is as it should be: {} would be {}", change, change_text(now, half)));
}

Json on_threads(const ProbedRun& run) {
  const int64_t threads = at::get_num_threads();
  if (!choose_device(run.options.compute.device).is_cpu())
    return line("threads", std::nullopt,
                fmt::format("the GPU computes; {} threads of {} processors prepare batches",
                            run.options.data.loader_threads, run.cpu_share));
  if (threads == run.cpu_share)
    return line("threads", 1.0, fmt::format("all {} processors compute: nothing to gain", threads));
  const std::string all = run.change("threads", "0");
  if (threads > run.cpu_share)
    return line("threads", std::nullopt,
                fmt::format("{} threads share {} processors and wait for each other: {}", threads,
                            run.cpu_share, all));
  const double gain = static_cast<double>(run.cpu_share) / static_cast<double>(threads);
  return line("threads", gain,
              fmt::format("{} of {} processors compute: {} is at most {} (not measured)", threads,
                          run.cpu_share, all, times_text(gain)));
}

Json on_recomputation(const Plan& now) {
  MemoryOptions memory = now.options.train.memory;
  const bool recomputes = !memory.recompute.is_none() || !memory.offload_activations.is_none();
  PlanOptions options = now.options;
  options.train.memory.budget = {};
  options.train.memory.offload_activations = {};
  options.train.memory.recompute = recomputes ? SegmentSet() : SegmentSet::all();
  const Plan other = make_plan(options);
  const double gain = now.step_s / other.step_s;
  if (!recomputes)
    return line("recomputation", gain,
                fmt::format("none, the fastest; {} would be {}", options.change("recompute", "all"),
                            change_text(now, other)));
  const double share =
      100 * static_cast<double>(other.needed_bytes) / static_cast<double>(other.machine.memory_bytes);
  const std::string none = options.change("recompute", "none");
  if (!other.fits)
    return line(
        "recomputation", std::nullopt,
        fmt::format("recomputation is needed: without it the run takes {:.0f} % of the memory (planned)",
                    share));
  return line("recomputation", gain,
              fmt::format("{}: {}, which is {:.0f} % of the memory", none, change_text(now, other), share));
}

Json on_checkpoints(const Json& result, const StepFigures& measured, const ProbedRun& run) {
  const double pause = result.at("measured").value("checkpoint_pause_s", 0.0);
  const int64_t every = run.options.checkpoints.every;
  if (pause == 0)
    return line("checkpoint", std::nullopt, "not measured: --no-checkpoint leaves the one at the end out");
  if (every == 0)
    return line("checkpoint", 1.0,
                fmt::format("a checkpoint stops training for {} s, only at the end (measured)",
                            number_text(pause, 3)));
  const double between = static_cast<double>(every) * measured.step_s, share = pause / (between + pause);
  const std::string text = fmt::format(
      "a checkpoint stops training for {} s, {} % of the time at {} (measured)", number_text(pause, 3),
      number_text(100 * share, 2), run.change("checkpoint-every", std::to_string(every)));
  if (share < kCheckpointShare) return line("checkpoint", 1 / (1 - share), text + ": nothing to gain");
  // Rounded up to two digits.
  const double least = pause * (1 - kCheckpointShare) / kCheckpointShare / measured.step_s;
  const double unit = std::max(1.0, std::pow(10, std::floor(std::log10(std::max(least, 1.0))) - 1));
  const auto rarer = static_cast<int64_t>(std::ceil(least / unit) * unit);
  return line("checkpoint", (1 - kCheckpointShare) / (1 - share),
              fmt::format("{}: {} takes 1 %", text, run.change("checkpoint-every", std::to_string(rarer))));
}

// Adds what a plan of this machine says, or one line why there is none.
void add_planned(const ProbedRun& run, Json& advice) try {
  const auto machine = profile_of(choose_device(run.options.compute.device));
  if (!machine) fail("plan", "no profile of this GPU: kiln plan --calibrate measures one");
  PlanOptions options;
  options.train = run.options;
  options.gpu = machine->device == DryRunDevice::kCpu ? "cpu" : machine->name;
  options.gpus = run.world_size;
  options.change = run.change;
  const Plan now = make_plan(options);
  advice.push_back(on_precision(now));
  advice.push_back(on_recomputation(now));
} catch (const Error& error) {
  advice.push_back(line("precision", std::nullopt, "not planned: " + message_of(error)));
}

}  // namespace

Json probe_advice(const Json& result, const ProbedRun& run) {
  const StepFigures measured = figures_from_json(result.at("measured"));
  Json advice = Json::array({on_loader(measured, run), on_threads(run)});
  advice.push_back(on_checkpoints(result, measured, run));
  add_planned(run, advice);
  return advice;
}

}  // namespace kiln::cli
