// The kiln program. Each file in this folder parses one subcommand.
#include <CLI/CLI.hpp>
#include <string>

#include "cli/build_identity.h"
#include "cli/commands.h"
#include "core/allocations.h"
#include "core/command_line.h"

int main(int argc, char** argv) {
  kiln::install_tracking_cpu_allocator();  // before the first tensor
  CLI::App app{"Kiln trains and runs latent diffusion models.", "kiln"};
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("kiln ") + kiln::cli::build_identity());
  for (const auto& add_command : kiln::cli::kCommands) add_command(app);
  return kiln::run_command_line(app, argc, argv);
}
