#include <unistd.h>

#include <algorithm>

#include "cli/build_identity.h"
#include "cli/commands.h"
#include "cli/probe.h"
#include "cli/train_options.h"
#include "core/command_line.h"
#include "ops/attention.h"
#include "ops/cuda/launch.h"
#include "ops/op_recorder.h"
#include "parallel/cpu_share.h"
#include "parallel/machine.h"
#include "parallel/ranks/ranks.h"
#include "parallel/ranks/rendezvous.h"
#include "plan/fit/budget.h"
#include "plan/price/this_machine.h"
#include "plan/report/variants.h"
#include "plan/run/make_plan.h"
#include "plan/trace/ideal_step.h"
#include "train/loop.h"
#include "train/probe.h"
#include "train/stages/stages.h"

namespace kiln::cli {

namespace {

// While this lives, the output of training goes to standard error: standard output is for the result.
class StdoutToStderr {
 public:
  StdoutToStderr() : stdout_(::dup(STDOUT_FILENO)) {
    std::fflush(stdout);
    ::dup2(STDERR_FILENO, STDOUT_FILENO);
  }
  ~StdoutToStderr() {
    std::fflush(stdout);
    ::dup2(stdout_, STDOUT_FILENO);
    ::close(stdout_);
  }
  StdoutToStderr(const StdoutToStderr&) = delete;

 private:
  int stdout_;
};

// Returns the options to probe, which are those of the first stage if there are several.
TrainOptions probed(const TrainOptions& options) {
  if (options.stages.empty()) return with_length(options);
  fmt::print(stderr, "a probe of {}, the first of {}\n", stage_name(options.stages[0], 0),
             options.stages.size());
  TrainOptions first = options_of_stage(options, 0);
  if (options.stages[0].steps > 0) first.max_steps = options.stages[0].steps;
  return with_length(first);
}

// A published batch takes minutes per step on a CPU, and shows no more than a small one.
constexpr int64_t kCpuBatch = 8;

// Sets a small batch for a CPU if none was given. Returns whether it did.
bool make_cpu_batch(const ResolvedOptions& resolved, TrainOptions& options, int64_t world_size) {
  const bool on_cpu =
      options.compute.device == DeviceChoice::kCpu ||
      (options.compute.device == DeviceChoice::kAuto && choose_device(options.compute.device).is_cpu());
  if (!on_cpu || resolved.given.contains("global-batch") || resolved.given.contains("micro-batch"))
    return false;
  options.global_batch = std::max(kCpuBatch, world_size);
  return true;
}

// Returns {"attention": [engines], "epilogues": {product: {"served", "refused"}}}: what torch and cuBLASLt
// chose on this GPU.
nlohmann::json choices_of_gpu() {
  nlohmann::json epilogues = nlohmann::json::object();
  for (const ops::cuda::EpilogueCount& count : ops::cuda::epilogue_counts())
    epilogues[count.product] = {{"served", count.served}, {"refused", count.refused}};
  return {{"attention", ops::cuda::engines_used()}, {"epilogues", std::move(epilogues)}};
}

// Returns the ideal list of the run's usual step. fp8 has none: how fast its products are is not measured.
std::vector<IdealSegment> ideal_of(const TrainOptions& options, int64_t world_size) {
  if (options.compute.is_fp8()) return {};
  const DataShape shape = describe(options).shape;
  return ideal_step(options, usual_shape(shape).value_or(shape), world_size);
}

nlohmann::json measure(ProbeOptions options, const FitTerms& terms, bool has_cpu_batch) {
  const StdoutToStderr redirect;
  options.group = join_ranks(options.train, build_identity());
  if (has_cpu_batch && options.group->rank() == 0)
    fmt::print("on a CPU without --global-batch: {} images a step, where kiln train has {}\n",
               options.train.global_batch, TrainOptions().global_batch);
  const FittedRun fitted = fit_run(options.train, *options.group, terms);
  if (!fitted.speed.empty()) fmt::print("this machine: {}\n", fitted.speed);
  if (!fitted.summary.empty()) fmt::print("{}\n", fitted.summary);
  options.train = fitted.options;
  options.predicted = fitted.predicted;
  if (const auto machine = profile_of(choose_device(options.train.compute.device)))
    options.memory_bytes = machine->memory_bytes;
  options.data_sheet_flops =
      data_sheet_flops(choose_device(options.train.compute.device, options.group->ranks().local_rank),
                       options.train.compute.product_dtype(), options.train.compute.tf32);
  options.ideal = ideal_of(options.train, options.group->world_size());
  const int64_t processors = cpu_share(*options.group);
  nlohmann::json result = probe(options);
  if (options.group->rank() == 0)
    result["advice"] = probe_advice(result, {.options = options.train,
                                             .world_size = options.group->world_size(),
                                             .cpu_share = processors,
                                             .change = terms.change});
  // The plan was made before the run: the machine's speed is measured once more after it.
  const at::Device device = choose_device(options.train.compute.device, options.group->ranks().local_rank);
  if (options.group->rank() == 0 && device.is_cuda()) result["gpu"] = choices_of_gpu();
  if (options.group->rank() != 0 || !device.is_cpu() || !has_clock(find_profile("cpu"))) return result;
  read_again(device);
  if (const std::string speed = describe(find_profile("cpu").speed); !speed.empty())
    fmt::print("this machine, before and after: {}\n", speed);
  return result;
}

}  // namespace

void add_probe_command(CLI::App& app) {
  auto* command = app.add_subcommand("probe",
                                     "Train some real steps and compare them with the plan; nothing of the "
                                     "run is kept (on a CPU with 8 images a step if no batch is given)");
  auto options = std::make_shared<ProbeOptions>();
  auto json = std::make_shared<bool>(false);
  command->add_option("--steps", options->steps, "Steps to take")->capture_default_str();
  command->add_flag("!--no-checkpoint", options->checkpoint,
                    "Leave out the checkpoint at the end, which takes as much disk as the run's");
  command->add_flag(
      "--audit-precision", options->audits_precision,
      "Look at one step operation by operation: casts, what runs in f32 and why, overflows by segment, "
      "time by dtype");
  command->add_option("--report", options->report, "Write the report of these steps (HTML) to this file");
  command->add_flag("--json", *json, "Print one JSON object, and nothing else, on standard output");
  auto variants = std::make_shared<VariantsCommand>();
  auto* file =
      command->add_option("--variants", variants->file,
                          "TOML file of variants: options that all share, then a [name] for each, with on = "
                          "\"NAME\" if it starts from another one; prints one table of what each gains");
  command
      ->add_option("--plan-for", variants->gpu,
                   "--variants: plan them for this GPU (names: kiln plan --help; cpu: this processor) "
                   "instead of running them")
      ->needs(file);
  const auto train = add_train_options(*command, "kiln train");
  show_first(*command, {"--steps", "--audit-precision", "--report", "--variants", "--plan-for", "--recipe",
                        "--model", "--data", "--image-size", "--global-batch", "--micro-batch",
                        "--compute-dtype", "--recompute", "--memory-budget", "--nproc"});
  command->callback([=] {
    const ResolvedOptions resolved = resolve(*command, *train);
    if (!variants->file.empty()) {
      variants->steps = options->steps;
      variants->checkpoint = options->checkpoint;
      const nlohmann::json table = compare_variants(*variants, resolved.options, resolved.given);
      fmt::print("{}", *json ? table.dump(1) + "\n" : variants_text(table));
      return;
    }
    options->train = probed(resolved.options);
    if (options->train.out.empty())
      options->train.out = "probe";  // never written, but validation requires one
    const Ranks ranks = ranks_from_environment();
    const bool has_cpu_batch =
        make_cpu_batch(resolved, options->train, std::max(ranks.world_size, options->train.ranks.nproc));
    if (const int64_t num_ranks = ranks_to_launch(options->train)) return launch_ranks(num_ranks);
    const FitTerms terms{.may_choose_micro_batch = !resolved.given.contains("micro-batch"),
                         .change = resolved.change};
    const nlohmann::json result = measure(*options, terms, has_cpu_batch);
    if (!result.is_null()) fmt::print("{}", *json ? result.dump(1) + "\n" : probe_text(result));
  });
}

}  // namespace kiln::cli
