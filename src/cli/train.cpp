#include <algorithm>

#include "cli/commands.h"
#include "core/error.h"
#include "core/toml.h"
#include "train/loop.h"

namespace kiln::cli {

namespace {

void add_option(CLI::App& command, const std::string& name, bool& field, const char* help) {
  command.add_flag("--" + name + ",!--no-" + name, field, help);
}
template <class T>
void add_option(CLI::App& command, const std::string& name, std::vector<T>& field, const char* help) {
  command.add_option("--" + name, field, help)->delimiter(',')->capture_default_str();
}
template <class T>
void add_option(CLI::App& command, const std::string& name, T& field, const char* help) {
  command.add_option("--" + name, field, help)->take_last()->capture_default_str();
}

// What the command line does not say comes from the recipe.
void apply_recipe(const CLI::App& command, const std::string& path, TrainOptions& options) {
  TrainOptions overridden;  // still checked
  for (const TomlEntry& entry : read_toml(path)) {
    const CLI::Option* option = command.get_option_no_throw("--" + entry.key);
    const bool is_overridden = option != nullptr && option->count() > 0;
    try {
      set_option(is_overridden ? overridden : options, entry.key, entry.value);
    } catch (const Error& error) {
      throw Error(fmt::format("{} ({} line {})", error.what(), path, entry.line));
    }
  }
}

}  // namespace

void add_train_command(CLI::App& app) {
  auto* command = app.add_subcommand("train", "Train a denoiser; rerunning the same command resumes");
  auto options = std::make_shared<TrainOptions>();
  auto recipe = std::make_shared<std::string>();
  command->add_option("--recipe", *recipe, "TOML file of these options; the command line goes before it");
  visit_options(*options, [&](const char* name, auto& field, OnResume, const char* help) {
    add_option(*command, name, field, help);
  });
  command->callback([=] {
    if (!recipe->empty()) apply_recipe(*command, *recipe, *options);
    train(*options);
  });
}

}  // namespace kiln::cli
