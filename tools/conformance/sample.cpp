// sample: end to end, a model under guidance in a sampler's loop.
#include <ATen/core/grad_mode.h>

#include <memory>

#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "diffusion/sampler.h"
#include "io.h"
#include "model_io.h"
#include "sample/sampler_loop.h"
#include "sampler_io.h"
#include "verbs.h"

namespace kiln::conformance {
namespace {

struct SampleVerbOptions {
  std::string model, model_config, weights, config, inputs, outputs;
};

struct Guided {
  std::unique_ptr<Sampler> sampler;
  double cfg_scale;
};

Guided parse_guided(const nlohmann::json& json) {
  const JsonConfig config("sample", json);
  if (!config.has("sampler")) fail("sample", "expected \"sampler\" in the config");
  return {make_sampler(config.object("sampler")), config.get("cfg_scale", 1.0)};
}

void run_end_to_end(const SampleVerbOptions& options) {
  const Guided guided = parse_config(options.config, parse_guided);
  const auto denoiser = load_denoiser(options.model, options.model_config, options.weights).denoiser;
  const Inputs inputs(options.inputs);
  const DenoiserShape& shape = denoiser->shape();
  const int64_t side = shape.size_multiple > 0 ? -1 : shape.input_size;
  const at::Tensor noise = inputs.get("noise", {-1, shape.in_channels, side, side});
  const at::NoGradGuard no_grad;
  const Conditioning cond = read_conditioning(inputs, {noise.size(0)}, shape);
  Conditioning uncond;
  if (guided.cfg_scale != 1)
    uncond = shape.conditioning.takes_text() ? read_conditioning(inputs, {noise.size(0)}, shape, "uncond_")
                                             : unconditional(shape.conditioning, cond);
  const CfgConvention convention =
      shape.conditioning.takes_text() ? CfgConvention::kAll : CfgConvention::kModel;
  const DenoiseFn denoise = guided_denoiser(*denoiser, cond, uncond, guided.cfg_scale, convention);
  write_outputs(options.outputs, record_samples(*guided.sampler, inputs, denoise));
}

}  // namespace

void add_sample_verb(CLI::App& app) {
  auto options = std::make_shared<SampleVerbOptions>();
  CLI::App* verb = app.add_subcommand("sample", "A model under guidance in a sampler's loop");
  verb->add_option("--model", options->model, "Model name")->required();
  verb->add_option("--model-config", options->model_config, "JSON config of the model")->required();
  verb->add_option("--weights", options->weights, ".safetensors, *.index.json, .pt or .pth")->required();
  verb->add_option("--config", options->config, "JSON config: sampler, cfg_scale")->required();
  verb->add_option("--inputs", options->inputs, "noise, start_from, step_noise, y")->required();
  verb->add_option("--outputs", options->outputs, "File to write")->required();
  verb->callback([options] { run_end_to_end(*options); });
}

}  // namespace kiln::conformance
