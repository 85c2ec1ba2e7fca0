// sampler: a sampler's steps on given model outputs and given noise.
#include <ATen/core/grad_mode.h>

#include <memory>

#include "core/aten.h"
#include "core/error.h"
#include "diffusion/sampler.h"
#include "io.h"
#include "sampler_io.h"
#include "verbs.h"

namespace kiln::conformance {
namespace {

struct SamplerOptions {
  std::string config, inputs, outputs;
};

at::Tensor given_step_noise(const Inputs& inputs, const at::Tensor& noise, int64_t step) {
  const at::Tensor rows =
      inputs.get("step_noise", {-1, noise.size(0), noise.size(1), noise.size(2), noise.size(3)});
  if (step >= rows.size(0))
    fail("sampler", "step {} needs row {} of step_noise, which has {} in {}", step, step, rows.size(0),
         inputs.path());
  return rows[step];
}

void run_given_outputs(const SamplerOptions& options) {
  const auto sampler = parse_config(options.config, make_sampler);
  const Inputs inputs(options.inputs);
  const at::Tensor noise = inputs.get("noise", {-1, -1, -1, -1});
  const int64_t steps = static_cast<int64_t>(sampler->timesteps().size());
  const at::Tensor outputs =
      inputs.get("model_outputs", {-1, noise.size(0), -1, noise.size(2), noise.size(3)});
  if (outputs.size(0) < steps)
    fail("sampler", "expected {} model_outputs, one per step, got {} in {}", steps, outputs.size(0),
         options.inputs);
  const at::NoGradGuard no_grad;
  int64_t row = 0;
  write_outputs(options.outputs,
                record_samples(*sampler, inputs, [&](const at::Tensor&, double) { return outputs[row++]; }));
}

}  // namespace

Tensors record_samples(Sampler& sampler, const Inputs& inputs, const DenoiseFn& denoise) {
  const at::Tensor noise = inputs.get("noise", {-1, -1, -1, -1});
  if (noise.size(0) < 1) fail("sampler", "expected at least one sample in {}", inputs.path());
  std::vector<at::Tensor> samples;
  run_sampler_from(
      sampler,
      inputs.has("start_from") ? sampler.noised(inputs.get("start_from", noise.sizes().vec()), noise)
                               : noise * sampler.start_scale(),
      denoise, [&](int64_t step) { return given_step_noise(inputs, noise, step); },
      [&](int64_t, const at::Tensor& x) { samples.push_back(x); });
  return {{"timesteps", at::tensor(sampler.timesteps(), at::kDouble).to(at::kFloat)},
          {"samples", at::stack(samples)}};
}

void add_sampler_verb(CLI::App& app) {
  auto options = std::make_shared<SamplerOptions>();
  CLI::App* verb = app.add_subcommand("sampler", "A sampler's steps on given model outputs");
  verb->add_option("--config", options->config, "JSON config of the sampler")->required();
  verb->add_option("--inputs", options->inputs, "noise, start_from, model_outputs, step_noise")->required();
  verb->add_option("--outputs", options->outputs, "File to write")->required();
  verb->callback([options] { run_given_outputs(*options); });
}

}  // namespace kiln::conformance
