// Runs a program of subcommands: help, errors in one line, exit status. Torch-free.
#pragma once
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace kiln {

// Names the descriptor on which a rank tells its launcher why it ends (parallel/ranks/rendezvous.h): what
// several ranks say is then printed once.
inline constexpr const char* kErrorDescriptor = "KILN_ERROR_FD";

// Makes --help of a command with many options show only those of these names ("--model"), in the groups of
// the whole list, and a line that names "--help all", which shows every option.
void show_first(CLI::App& command, std::vector<std::string> names);

// Lowers the process to KILN_CPU (core/cpu_level.h), parses the arguments and runs the command's callback.
// Returns the exit status: 0, 1 after an error, 2 if the command line could not be read. An error is printed
// to stderr, or told to the launcher, as one line that begins with the command's name. For an unknown command
// or option the line suggests what may have been meant, if anything is near.
int run_command_line(CLI::App& app, int argc, char** argv);

}  // namespace kiln
