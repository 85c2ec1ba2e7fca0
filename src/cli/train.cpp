#include <filesystem>
#include <utility>

#include "cli/build_identity.h"
#include "cli/commands.h"
#include "cli/train_options.h"
#include "core/command_line.h"
#include "core/error.h"
#include "parallel/machine.h"
#include "parallel/ranks/rendezvous.h"
#include "plan/fit/budget.h"
#include "plan/price/this_machine.h"
#include "train/dataset/data_source.h"
#include "train/loop.h"

namespace kiln::cli {

namespace {

// Returns the recipe that the run in `out` was trained with if the command line leaves open what to train:
// with --continue-with, or if it names neither data nor a model. Otherwise returns "".
std::string continued_recipe(const CLI::App& command, const std::string& out, bool is_continued) {
  const std::string recipe = out + "/config.toml";
  const bool is_run = !out.empty() && std::filesystem::exists(recipe);
  if (is_continued && !is_run)
    fail("train", "--continue-with goes on with the run in --out, {}: give a run's folder as --out",
         out.empty() ? "which is not given" : out + " has no config.toml");
  const bool names_none = command.count("--data") == 0 && command.count("--model") == 0;
  return is_run && (is_continued || names_none) ? recipe : "";
}

}  // namespace

void add_train_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "train", "Train a denoiser; rerunning the same command resumes, as does --out RUN alone");
  const auto arguments = add_train_options(*command);
  const auto ahead = std::make_shared<std::string>();
  command->add_option("--continue-with", *ahead,
                      "Recipe of what follows the newest checkpoint of --out: its [[stage]]s, or its options "
                      "as one stage; everything else stays as in RUN/config.toml");
  const auto saves_the_end = std::make_shared<bool>(true);
  command->add_flag(
      "!--no-checkpoint", *saves_the_end,
      "Leave out the checkpoint at the end, also where a signal ends the run: what is kept is its log");
  show_first(*command, {"--recipe", "--model", "--weights", "--lora-rank", "--data", "--autoencoder", "--out",
                        "--image-size", "--max-steps", "--global-batch", "--lr", "--compute-dtype",
                        "--memory-budget", "--nproc", "--sample-every"});
  command->callback([=] {
    if (arguments->recipe.empty())
      arguments->recipe = continued_recipe(*command, arguments->options.out, !ahead->empty());
    const ResolvedOptions resolved = resolve(*command, *arguments);
    const TrainOptions& options = resolved.options;
    require_autoencoder(options.data);
    if (const int64_t num_ranks = ranks_to_launch(options)) return launch_ranks(num_ranks);
    const std::shared_ptr<ProcessGroup> group = join_ranks(options, build_identity());
    bool told_speed = false;  // this machine's, which is read once for the plans of all stages
    train(options, {.data_sheet_flops =
                        data_sheet_flops(choose_device(options.compute.device, group->ranks().local_rank),
                                         options.compute.product_dtype(), options.compute.tf32),
                    .saves_the_end = *saves_the_end,
                    .fit = [&](const TrainOptions& stage) -> StageFit {
                      FittedRun fitted = fit_run(stage, *group, {.change = resolved.change});
                      if (!fitted.speed.empty() && !std::exchange(told_speed, true))
                        fmt::print("this machine: {}\n", fitted.speed);
                      const auto [share, warning] = memory_share(fitted, resolved.change);
                      if (!share.empty()) fmt::print("{}\n", share);
                      if (!warning.empty()) fmt::print(stderr, "warning: {}\n", warning);
                      return {.options = std::move(fitted.options),
                              .predicted = std::move(fitted.predicted),
                              .summary = std::move(fitted.summary)};
                    },
                    .ahead = ahead->empty() ? std::vector<StageOptions>() : stages_ahead(*ahead),
                    .group = group});
  });
}

}  // namespace kiln::cli
