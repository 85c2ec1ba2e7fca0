// The options of training on the command line, shared by every command that takes them: train, plan, probe.
#pragma once
#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "core/toml.h"
#include "run/train_options.h"

namespace kiln::cli {

struct TrainArguments {
  TrainOptions options;
  std::string recipe, deepspeed, accelerate;
};
struct ResolvedOptions {
  TrainOptions options;
  // How a user changes an option: on the command line, or in the DeepSpeed file that sets it.
  std::function<std::string(const std::string& option, const std::string& value)> change;
  std::set<std::string> given;  // names that the command line, the recipe or the DeepSpeed file set
};

// Adds --recipe, --deepspeed, --accelerate and every option of TrainOptions. `prefix` begins their headings
// in --help.
std::shared_ptr<TrainArguments> add_train_options(CLI::App& command, const std::string& prefix = "");

// After parsing: what the command line does not say comes from the DeepSpeed file, then from the recipe. Says
// on stderr what was taken from the former. `world_size`: ranks of the run; 0: as the options or the launcher
// say. Throws Error naming the recipe's line or the file's key.
ResolvedOptions resolve(const CLI::App& command, const TrainArguments& arguments, int64_t world_size = 0);

// The [[stage]]s of a recipe. Throws Error naming its line.
std::vector<StageOptions> stages_of(const TomlDocument& recipe, const std::string& path);
// The stages of the recipe of --continue-with: its options hold for each of them; without [[stage]]s they are
// one. Throws Error likewise.
std::vector<StageOptions> stages_ahead(const std::string& recipe);

}  // namespace kiln::cli
