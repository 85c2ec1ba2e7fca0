// The options of training on the command line, shared by the commands that take them: train, plan, probe.
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
  bool starts_ranks = true;  // one process for each of --nproc, of which the first says what was read
};
struct ResolvedOptions {
  TrainOptions options;
  // Returns how a user changes an option: on the command line, or in the DeepSpeed file that sets it.
  std::function<std::string(const std::string& option, const std::string& value)> change;
  std::set<std::string> given;  // names that the command line, the recipe or the DeepSpeed file set
};

// Adds --recipe, --deepspeed, --accelerate and every option of TrainOptions. `prefix` begins their headings
// in --help.
std::shared_ptr<TrainArguments> add_train_options(CLI::App& command, const std::string& prefix = "");

// Called after parsing. Options that the command line does not set come from the DeepSpeed file, then from
// the recipe. Prints on stderr what the DeepSpeed file sets. `world_size` is the number of ranks; 0: as the
// options or the launcher say. Throws Error naming the recipe's line or the file's key.
ResolvedOptions resolve(const CLI::App& command, const TrainArguments& arguments, int64_t world_size = 0);

// Returns the [[stage]]s of a recipe. Throws Error naming its line.
std::vector<StageOptions> stages_of(const TomlDocument& recipe, const std::string& path);
// Returns the stages of --continue-with's recipe. Its other options hold for each of them; a recipe without
// [[stage]]s is one stage. Throws Error likewise.
std::vector<StageOptions> stages_ahead(const std::string& recipe);

}  // namespace kiln::cli
