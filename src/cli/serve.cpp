#include "cli/commands.h"
#include "serve/http_server.h"
#include "watch/reported_run.h"

namespace kiln::cli {

void add_serve_command(CLI::App& app) {
  auto* command =
      app.add_subcommand("serve", "Show runs in a browser while they train, and ask things of them");
  auto options = std::make_shared<ServeOptions>();
  command->add_option("runs", options->runs, "Run folders")->required();
  command->add_option("--port", options->port, "Port of 127.0.0.1 to listen on (0: a free one)")
      ->capture_default_str();
  command->add_flag("--read-only", options->is_read_only,
                    "Show, but ask nothing of the runs and draw nothing");
  command
      ->add_option("--device", options->device,
                   "Device to draw on: auto, cpu or cuda, which takes memory from a run there")
      ->capture_default_str();
  command->add_option("--threads", options->threads, "Threads to draw with (0: all cores)")
      ->capture_default_str();
  command->callback([options] {
    for (const std::string& run : options->runs) require_run_folder("serve", run);
    serve(*options);
  });
}

}  // namespace kiln::cli
