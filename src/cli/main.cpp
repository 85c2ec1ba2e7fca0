// The kiln program. Each file in this folder parses one subcommand.
#include "cli/commands.h"
#include "core/allocations.h"
#include "core/command_line.h"

int main(int argc, char** argv) {
  kiln::install_tracking_cpu_allocator();  // before the first tensor
  CLI::App app;
  kiln::cli::make_program(app);
  return kiln::run_command_line(app, argc, argv);
}
