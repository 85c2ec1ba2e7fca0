// The options of training on the command line, shared by every command that takes them: train, plan, probe.
#pragma once
#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "train/train_config.h"

namespace kiln::cli {

struct TrainArguments {
  TrainOptions options;
  std::string recipe;
};

// Adds --recipe and every option of TrainOptions. `group`: heading in --help.
std::shared_ptr<TrainArguments> add_train_options(CLI::App& command, const std::string& group = "Options");

// After parsing: what the command line does not say comes from the recipe. Throws Error naming the recipe's
// line.
TrainOptions resolve(const CLI::App& command, const TrainArguments& arguments);

}  // namespace kiln::cli
