#include "core/command_line.h"

#include <fmt/ranges.h>
#include <limits.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/cpu_level.h"
#include "core/error.h"
#include "core/text/nearest_name.h"
#include "core/text/printable.h"

namespace kiln {

namespace {

// docs/environment.md lists what the program returns.
constexpr int kFailed = 1, kWrongUsage = 2;
constexpr size_t kMostSuggested = 3;

const CLI::App& command_in(const CLI::App& app) {
  const std::vector<CLI::App*> commands = app.get_subcommands();
  return commands.empty() ? app : command_in(*commands.front());
}

std::string full_name(const CLI::App& app) {
  return app.get_parent() ? full_name(*app.get_parent()) + " " + app.get_name() : app.get_name();
}

std::vector<std::string> options_of(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

std::vector<std::string> commands_of(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::App* inner : command.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(inner->get_name());
  return names;
}

// Returns the command's names of what another command calls `name`: --autoencoder for convert's --vae.
std::vector<std::string> names_elsewhere(const CLI::App& app, const CLI::App& command,
                                         const std::string& name) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    if (!option->check_name(name)) continue;
    for (const std::string& other : option->get_lnames())
      if (std::string known = "--" + other; command.get_option_no_throw(known))
        names.push_back(std::move(known));
  }
  for (const CLI::App* inner : app.get_subcommands([](const CLI::App*) { return true; }))
    if (names.empty()) names = names_elsewhere(*inner, command, name);
  return names;
}

// Returns ": did you mean --a or --b?", or "" without names.
std::string did_you_mean(const std::vector<std::string>& names) {
  return names.empty() ? "" : fmt::format(": did you mean {}?", fmt::join(names, " or "));
}

// Explains a value of the wrong kind, of which CLI11 only says "Could not convert: --max-steps = many".
// Returns nothing for other errors.
std::optional<std::string> explain_conversion(const CLI::App& command, const std::string& text) {
  constexpr std::string_view kBegin = "Could not convert: ", kBetween = " = ";
  const size_t between = text.find(kBetween);
  if (!text.starts_with(kBegin) || between == std::string::npos) return std::nullopt;
  const std::string name = text.substr(kBegin.size(), between - kBegin.size());
  const CLI::Option* option = command.get_option_no_throw(name);
  const std::string kind = option ? option->get_type_name() : "";
  const char* expected = kind.starts_with("INT")    ? "a whole number"
                         : kind.starts_with("UINT") ? "a whole number from 0 on"
                                                    : "a number";
  return fmt::format("{} expects {}, got '{}'", name, expected, text.substr(between + kBetween.size()));
}

// Explains an error in one line. CLI11's own messages neither suggest the nearest name nor say which argument
// is wrong.
std::string explain(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& command = command_in(app);
  const std::vector<std::string> rest = command.remaining(), commands = commands_of(command);
  std::string known = fmt::format("expected a command: {}", fmt::join(commands, ", "));
  if (!rest.empty() && !commands.empty() && !rest.front().starts_with("-")) {
    const std::vector<std::string> similar = similar_names(rest.front(), commands, 1);
    return similar.empty()
               ? fmt::format("unknown command '{}': {}", rest.front(), known)
               : fmt::format("unknown command '{}': did you mean '{}'?", rest.front(), similar.front());
  }
  for (const std::string& argument : rest)
    if (argument.starts_with("-")) {
      const std::string name = argument.substr(0, argument.find('='));
      std::vector<std::string> meant = names_elsewhere(app, command, name);
      if (meant.empty()) meant = similar_names(name, options_of(command), kMostSuggested);
      return fmt::format("unknown option {}{}", name, did_you_mean(meant));
    }
  if (!rest.empty()) return fmt::format("unexpected argument '{}'", rest.front());
  if (!commands.empty()) return known;
  return explain_conversion(command, error.what()).value_or(message_of(error));
}

// Help of the options that most need; modes other than that of --help show all.
class FirstOptions : public CLI::Formatter {
 public:
  explicit FirstOptions(std::vector<std::string> names) : names_(std::move(names)) {}

  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    if (mode != CLI::AppFormatMode::Normal) return CLI::Formatter().make_help(app, std::move(name), mode);
    std::string text = make_description(app) + make_usage(app, std::move(name)) + make_positionals(app);
    for (const std::string& group : app->get_groups()) {
      const std::vector<const CLI::Option*> options = app->get_options([&](const CLI::Option* option) {
        return option->get_group() == group && std::ranges::any_of(names_, [&](const std::string& first) {
                 return option->check_name(first);
               });
      });
      if (!options.empty()) text += make_group(group, /*is_positional=*/false, options);
    }
    return text + "\n" + make_footer(app) + fmt::format("{} --help all: the rest\n", full_name(*app));
  }

 private:
  std::vector<std::string> names_;
};

bool asks_for_all(int argc, char** argv) {
  for (int i = 1; i + 1 < argc; ++i)
    if ((argv[i] == std::string_view("--help") || argv[i] == std::string_view("-h")) &&
        argv[i + 1] == std::string_view("all"))
      return true;
  return false;
}

// Returns false if no launcher listens. A pipe takes a text of this size at once or not at all.
bool tell_launcher(std::string_view text) {
  const char* name = std::getenv(kErrorDescriptor);
  if (!name || text.size() > PIPE_BUF) return false;
  int descriptor = -1;
  std::from_chars(name, name + std::strlen(name), descriptor);
  return ::write(descriptor, text.data(), text.size()) == std::ssize(text);
}

}  // namespace

void show_first(CLI::App& command, std::vector<std::string> names) {
  command.formatter(std::make_shared<FirstOptions>(std::move(names)));
}

int run_command_line(CLI::App& app, int argc, char** argv) {
  try {
    lower_cpu_level();
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_name() == "CallForHelp" && asks_for_all(argc, argv)) return app.exit(CLI::CallForAllHelp());
    if (error.get_exit_code() == 0) return app.exit(error);  // help, version
    const std::string command = full_name(command_in(app));
    fmt::print(stderr, "{}: {} ({} --help)\n", command, explain(app, error), command);
    return kWrongUsage;
  } catch (const std::exception& error) {
    std::fflush(stdout);                                       // in a log too, the error is the last line
    std::string message = printable(message_of(error), "\n");  // it may name what is in a file
    // fmt says so of a standard output that takes no more.
    if (constexpr std::string_view kOfFmt = "cannot write to file"; message.starts_with(kOfFmt))
      message.replace(0, kOfFmt.size(), "cannot write the output");
    if (!tell_launcher(message)) fmt::print(stderr, "{}: {}\n", full_name(command_in(app)), message);
    return kFailed;
  }
  if (std::fflush(stdout) == 0) return 0;
  fmt::print(stderr, "{}: cannot write the output: {}\n", full_name(command_in(app)), std::strerror(errno));
  return kFailed;
}

}  // namespace kiln
