#include "download/download_command.h"

#include <cstdlib>

#include "cli/commands.h"
#include "core/error.h"

namespace kiln::cli {

void add_download_command(CLI::App& app) {
  struct Options {
    std::vector<std::string> names;
    DownloadOptions download;
    bool list = false;
  };
  auto* command = app.add_subcommand("download", "Fetch published weights by name and print where they are");
  auto options = std::make_shared<Options>();
  command->add_option("names", options->names, "Names from --list");
  command->add_flag("--list", options->list, "List every name with its address, size, SHA-256 and licence");
  command->add_flag("--offline", options->download.offline, "Use only what was fetched before");
  command->add_option("--mirror", options->download.mirrors,
                      "Address with the same files under the same names, tried first (also KILN_MIRROR)");
  command->callback([options] {
    if (options->list) return list_published_weights();
    if (options->names.empty()) fail("download", "expected a name; kiln download --list lists them");
    if (const char* mirror = std::getenv("KILN_MIRROR")) options->download.mirrors.emplace_back(mirror);
    for (const std::string& name : options->names)
      fmt::print("{}\n", download_weights(name, options->download));
  });
}

}  // namespace kiln::cli
