// What shells complete, and the page for man: both made from the options that --help shows.
#pragma once
#include <CLI/CLI.hpp>
#include <string>

namespace kiln::cli {

// Returns the script that makes a shell complete the program's commands, their options and the values of
// options that name them. `shell`: bash, zsh or fish. Throws Error for another one.
std::string completion_script(const CLI::App& program, const std::string& shell);

// Returns the page of section 1 in roff: every command with all its options.
std::string man_page(const CLI::App& program, const std::string& version);

}  // namespace kiln::cli
