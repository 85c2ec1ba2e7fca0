// How a program of subcommands ends: help, one line about what is wrong, or what its command returns.
// Torch-free.
#pragma once

namespace CLI {
class App;
}

namespace kiln {

// Parses the arguments, which runs the command's callback. Returns the exit status: an error is printed on
// stderr as one line that begins with the program's name; an unknown command or option names the nearest one.
int run_command_line(CLI::App& app, int argc, char** argv);

}  // namespace kiln
