// The kiln program: one subcommand per file in this folder, each parse-only.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/commands.h"
#include "core/allocations.h"
#include "core/error.h"

int main(int argc, char** argv) {
  kiln::install_tracking_cpu_allocator();  // before the first tensor
  CLI::App app{"Kiln trains and runs latent diffusion models."};
  app.require_subcommand(1);
  app.set_version_flag("--version", "kiln " KILN_VERSION);
  app.set_help_all_flag("--help-all", "Help of every command");
  for (const auto& add_command : kiln::cli::kCommands) add_command(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    fmt::print(stderr, "kiln: {}\n", error.what());
    return 1;
  }
  return 0;
}
