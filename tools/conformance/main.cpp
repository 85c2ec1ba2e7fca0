// kiln-conformance: runs one component of Kiln on tensors from files, for comparison with other
// implementations.
#include <CLI/CLI.hpp>

#include "core/command_line.h"
#include "verbs.h"

int main(int argc, char** argv) {
  CLI::App app{"Runs one component of Kiln on tensors from files.", "kiln-conformance"};
  app.require_subcommand(1);
  for (const auto& add_verb : kiln::conformance::kVerbs) add_verb(app);
  return kiln::run_command_line(app, argc, argv);
}
