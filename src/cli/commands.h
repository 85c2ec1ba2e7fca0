// Every subcommand. Each function adds one to the app, with a callback that runs it.
#pragma once
#include <CLI/CLI.hpp>

namespace kiln::cli {

using AddCommand = void (*)(CLI::App&);
inline constexpr std::initializer_list<AddCommand> kCommands = {};

}  // namespace kiln::cli
