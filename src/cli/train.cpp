#include "cli/commands.h"
#include "cli/train_options.h"
#include "train/loop.h"

namespace kiln::cli {

void add_train_command(CLI::App& app) {
  auto* command = app.add_subcommand("train", "Train a denoiser; rerunning the same command resumes");
  const auto arguments = add_train_options(*command);
  command->callback([=] { train(resolve(*command, *arguments)); });
}

}  // namespace kiln::cli
