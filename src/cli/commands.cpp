#include "cli/commands.h"

#include "cli/build_identity.h"

namespace kiln::cli {

void make_program(CLI::App& app) {
  app.name("kiln")->description("Kiln trains and runs latent diffusion models.");
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("kiln ") + build_identity());
  for (const auto& add_command : kCommands) add_command(app);
}

}  // namespace kiln::cli
