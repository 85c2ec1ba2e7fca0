#include "convert/inspect.h"

#include "cli/commands.h"

namespace kiln::cli {

void add_inspect_command(CLI::App& app) {
  auto* command = app.add_subcommand("inspect", "List keys, shapes and counts of a model or a weights file");
  auto options = std::make_shared<InspectOptions>();
  command->add_option("path", options->path, "Weights file, diffusers folder, run folder or checkpoint");
  command->add_option("--model", options->model,
                      "Print key<TAB>shape lines of this model (DiT-XL/2, autoencoder_kl, ...)");
  command->add_option("--config", options->config, "JSON (text or file) that overrides the model's preset");
  command->add_flag("--ema,!--no-ema", options->ema,
                    "List the EMA weights of a file that holds both (default)");
  command->callback([options] { inspect(*options, stdout, stderr); });
}

}  // namespace kiln::cli
