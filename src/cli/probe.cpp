#include <unistd.h>

#include <algorithm>

#include "cli/build_identity.h"
#include "cli/commands.h"
#include "cli/train_options.h"
#include "core/error.h"
#include "parallel/launcher.h"
#include "parallel/machine.h"
#include "parallel/ranks.h"
#include "plan/budget.h"
#include "plan/this_machine.h"
#include "train/probe.h"
#include "train/run_ranks.h"

namespace kiln::cli {

namespace {

// What training prints goes to standard error while in scope: standard output is for the result.
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

// A published batch takes a CPU minutes a step, which tells no more than a small one.
constexpr int64_t kCpuBatch = 8;

// Whether the batch was made one for a CPU: where nothing was said of it.
bool make_cpu_batch(const ResolvedOptions& resolved, TrainOptions& options, int64_t world_size) {
  const bool on_cpu =
      options.device == "cpu" || (options.device == "auto" && parse_device(options.device).is_cpu());
  if (!on_cpu || resolved.given.contains("global-batch") || resolved.given.contains("micro-batch"))
    return false;
  options.global_batch = std::max(kCpuBatch, world_size);
  return true;
}

nlohmann::json measure(ProbeOptions options, const FitTerms& terms, bool has_cpu_batch) {
  const StdoutToStderr redirect;
  options.group = join_ranks(options.train, build_identity());
  if (has_cpu_batch && options.group->rank() == 0)
    fmt::print("on a CPU without --global-batch: {} images a step, where kiln train has {}\n",
               options.train.global_batch, TrainOptions().global_batch);
  const FittedRun fitted = fit_run(options.train, *options.group, terms);
  if (!fitted.summary.empty()) fmt::print("{}\n", fitted.summary);
  options.train = fitted.options;
  options.predicted = fitted.predicted;
  if (const auto machine = profile_of(parse_device(options.train.device)))
    options.memory_bytes = machine->memory_bytes;
  return probe(options);
}

}  // namespace

void add_probe_command(CLI::App& app) {
  auto* command = app.add_subcommand("probe",
                                     "Train some real steps and compare them with the plan; nothing is kept "
                                     "of the run (a CPU takes 8 images "
                                     "a step where no batch is given)");
  auto options = std::make_shared<ProbeOptions>();
  auto json = std::make_shared<bool>(false);
  command->add_option("--steps", options->steps, "Steps to take")->capture_default_str();
  command->add_flag("--json", *json, "Print one JSON object on standard output and nothing else there");
  const auto train = add_train_options(*command, "kiln train");
  command->callback([=] {
    const ResolvedOptions resolved = resolve(*command, *train);
    options->train = resolved.options;
    if (options->train.out.empty()) options->train.out = "probe";  // never written: validation wants one
    const Ranks ranks = ranks_from_environment();
    const bool has_cpu_batch =
        make_cpu_batch(resolved, options->train, std::max(ranks.world_size, options->train.nproc));
    if (const int64_t num_ranks = ranks_to_launch(options->train)) return launch_ranks(num_ranks);
    const FitTerms terms{.may_choose_micro_batch = command->count("--micro-batch") == 0};
    const nlohmann::json result = measure(*options, terms, has_cpu_batch);
    if (!result.is_null()) fmt::print("{}", *json ? result.dump(1) + "\n" : probe_text(result));
  });
}

}  // namespace kiln::cli
