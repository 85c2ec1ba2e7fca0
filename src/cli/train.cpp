#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/train_options.h"
#include "core/error.h"
#include "plan/budget.h"
#include "train/loop.h"

namespace kiln::cli {

void add_train_command(CLI::App& app) {
  auto* command = app.add_subcommand("train", "Train a denoiser; rerunning the same command resumes");
  const auto arguments = add_train_options(*command);
  command->callback([=] {
    const FittedRun run = fit_run(resolve(*command, *arguments));
    if (!run.summary.empty()) fmt::print("{}\n", run.summary);
    train(run.options, {.predicted = run.predicted});
  });
}

}  // namespace kiln::cli
