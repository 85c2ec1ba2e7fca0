// init: a freshly initialised checkpoint in published keys.

#include <memory>

#include "core/aten.h"
#include "io.h"
#include "model_io.h"
#include "models/weights.h"
#include "verbs.h"

namespace kiln::conformance {
namespace {

struct InitOptions {
  std::string model, config, outputs;
  uint64_t seed = 0;
};

void run_init(const InitOptions& options) {
  const auto denoiser = build_known_denoiser(options.model, options.config);
  initialize_weights(*denoiser, options.seed);
  Tensors weights;
  for (const auto& parameter : denoiser->parameters()) weights[parameter->key] = parameter->value;
  write_outputs(options.outputs, weights);
}

}  // namespace

void add_init_verb(CLI::App& app) {
  auto options = std::make_shared<InitOptions>();
  CLI::App* verb = app.add_subcommand("init", "A freshly initialised checkpoint");
  verb->add_option("--model", options->model, "Model name")->required();
  verb->add_option("--config", options->config, "JSON config of the model")->required();
  verb->add_option("--seed", options->seed, "Seed of all draws")->required();
  verb->add_option("--outputs", options->outputs, "Weights file to write")->required();
  verb->callback([options] { run_init(*options); });
}

}  // namespace kiln::conformance
