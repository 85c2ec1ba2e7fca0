#include <unistd.h>

#include "cli/build_identity.h"
#include "cli/commands.h"
#include "cli/train_options.h"
#include "core/error.h"
#include "parallel/launcher.h"
#include "parallel/machine.h"
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

nlohmann::json measure(ProbeOptions options, const FitTerms& terms) {
  const StdoutToStderr redirect;
  options.group = join_ranks(options.train, build_identity());
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
  auto* command = app.add_subcommand(
      "probe", "Train some real steps and compare them with the plan; nothing is kept of the run");
  auto options = std::make_shared<ProbeOptions>();
  auto json = std::make_shared<bool>(false);
  command->add_option("--steps", options->steps, "Steps to take")->capture_default_str();
  command->add_flag("--json", *json, "Print one JSON object on standard output and nothing else there");
  const auto train = add_train_options(*command, "kiln train");
  command->callback([=] {
    const ResolvedOptions resolved = resolve(*command, *train);
    options->train = resolved.options;
    if (options->train.out.empty()) options->train.out = "probe";  // never written: validation wants one
    if (const int64_t num_ranks = ranks_to_launch(options->train)) return launch_ranks(num_ranks);
    const FitTerms terms{.may_choose_micro_batch = command->count("--micro-batch") == 0};
    const nlohmann::json result = measure(*options, terms);
    if (!result.is_null()) fmt::print("{}", *json ? result.dump(1) + "\n" : probe_text(result));
  });
}

}  // namespace kiln::cli
