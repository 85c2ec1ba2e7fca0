// kiln-conformance: runs one component of Kiln on tensors from files, for comparison with other
// implementations.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "core/error.h"
#include "verbs.h"

int main(int argc, char** argv) {
  CLI::App app{"Runs one component of Kiln on tensors from files."};
  app.require_subcommand(1);
  for (const auto& add_verb : kiln::conformance::kVerbs) add_verb(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    fmt::print(stderr, "kiln-conformance: {}\n", error.what());
    return 1;
  }
  return 0;
}
