#include "cli/build_identity.h"
#include "cli/commands.h"
#include "cli/train_options.h"
#include "core/error.h"
#include "parallel/machine.h"
#include "parallel/ranks/launcher.h"
#include "plan/fit/budget.h"
#include "plan/price/this_machine.h"
#include "train/loop.h"
#include "train/run_ranks.h"

namespace kiln::cli {

void add_train_command(CLI::App& app) {
  auto* command = app.add_subcommand("train", "Train a denoiser; rerunning the same command resumes");
  const auto arguments = add_train_options(*command);
  command->callback([=] {
    const TrainOptions options = resolve(*command, *arguments).options;
    if (const int64_t num_ranks = ranks_to_launch(options)) return launch_ranks(num_ranks);
    const std::shared_ptr<ProcessGroup> group = join_ranks(options, build_identity());
    const FittedRun run = fit_run(options, *group);
    if (!run.summary.empty()) fmt::print("{}\n", run.summary);
    train(run.options, {.predicted = run.predicted,
                        .data_sheet_flops = data_sheet_flops(
                            choose_device(run.options.compute.device, group->ranks().local_rank),
                            run.options.compute.product_dtype(), run.options.compute.tf32),
                        .group = group});
  });
}

}  // namespace kiln::cli
