// sample: end to end, a model under guidance in a sampler's loop.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <memory>

#include "core/error.h"
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

void run_end_to_end(const SampleVerbOptions& options) {
  const nlohmann::json config = read_config(options.config);
  if (!config.is_object() || !config.contains("sampler"))
    fail("sample", "expected \"sampler\" in {}", options.config);
  const auto sampler = make_sampler(config.at("sampler"));
  const auto denoiser = load_denoiser(options.model, read_config(options.model_config), options.weights);
  const Inputs inputs(options.inputs);
  const DenoiserShape& shape = denoiser->shape();
  const at::Tensor noise = inputs.get("noise", {-1, shape.in_channels, shape.input_size, shape.input_size});
  at::Tensor labels;
  if (shape.num_classes > 0) labels = apply_label_drop(inputs.get("y", {noise.size(0)}), {}, shape);
  const nlohmann::json& scale = config.contains("cfg_scale") ? config.at("cfg_scale") : nlohmann::json(1.0);
  if (!scale.is_null() && !scale.is_number())
    fail("sample", "expected cfg_scale to be a number in {}", options.config);
  const at::NoGradGuard no_grad;
  const DenoiseFn denoise =
      guided_denoiser(*denoiser, labels, scale.is_null() ? 1.0 : scale.get<double>(), CfgConvention::kModel);
  write_outputs(options.outputs, record_samples(*sampler, inputs, denoise));
}

}  // namespace

void add_sample_verb(CLI::App& app) {
  auto options = std::make_shared<SampleVerbOptions>();
  CLI::App* verb = app.add_subcommand("sample", "A model under guidance in a sampler's loop");
  verb->add_option("--model", options->model, "Model name")->required();
  verb->add_option("--model-config", options->model_config, "JSON config of the model")->required();
  verb->add_option("--weights", options->weights, ".safetensors, *.index.json, .pt or .pth")->required();
  verb->add_option("--config", options->config, "JSON config: sampler, cfg_scale")->required();
  verb->add_option("--inputs", options->inputs, "noise, step_noise, y")->required();
  verb->add_option("--outputs", options->outputs, "File to write")->required();
  verb->callback([options] { run_end_to_end(*options); });
}

}  // namespace kiln::conformance
