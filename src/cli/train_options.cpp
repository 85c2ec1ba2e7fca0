#include "cli/train_options.h"

#include "core/error.h"
#include "core/toml.h"

namespace kiln::cli {

namespace {

CLI::Option* add_option(CLI::App& command, const std::string& name, bool& field, const char* help) {
  return command.add_flag("--" + name + ",!--no-" + name, field, help);
}
template <class T>
CLI::Option* add_option(CLI::App& command, const std::string& name, std::vector<T>& field, const char* help) {
  return command.add_option("--" + name, field, help)->delimiter(',')->capture_default_str();
}
template <class T>
CLI::Option* add_option(CLI::App& command, const std::string& name, T& field, const char* help) {
  return command.add_option("--" + name, field, help)->take_last()->capture_default_str();
}

}  // namespace

std::shared_ptr<TrainArguments> add_train_options(CLI::App& command, const std::string& group) {
  auto arguments = std::make_shared<TrainArguments>();
  command
      .add_option("--recipe", arguments->recipe,
                  "TOML file of these options; the command line goes before it")
      ->group(group);
  visit_options(arguments->options, [&](const char* name, auto& field, OnResume, const char* help) {
    add_option(command, name, field, help)->group(group);
  });
  return arguments;
}

TrainOptions resolve(const CLI::App& command, const TrainArguments& arguments) {
  TrainOptions options = arguments.options;
  if (arguments.recipe.empty()) return options;
  TrainOptions overridden;  // still checked
  for (const TomlEntry& entry : read_toml(arguments.recipe)) {
    const CLI::Option* option = command.get_option_no_throw("--" + entry.key);
    const bool is_overridden = option != nullptr && option->count() > 0;
    try {
      set_option(is_overridden ? overridden : options, entry.key, entry.value);
    } catch (const Error& error) {
      throw Error(fmt::format("{} ({} line {})", error.what(), arguments.recipe, entry.line));
    }
  }
  return options;
}

}  // namespace kiln::cli
