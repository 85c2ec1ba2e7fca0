// loss: an objective's noised input, target, loss and gradient for a given model output.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>

#include "core/error.h"
#include "diffusion/diffusion_config.h"
#include "diffusion/objective.h"
#include "io.h"
#include "verbs.h"

namespace kiln::conformance {
namespace {

struct LossOptions {
  std::string config, inputs, outputs;
};

// i64 indices of the schedule, checked here because the objectives do not look at values (a host
// synchronisation).
at::Tensor read_indices(const Inputs& inputs, int64_t batch, int64_t num_train_timesteps) {
  const at::Tensor t = inputs.get("t", {batch}).to(at::kLong);
  if (t.min().item<int64_t>() < 0 || t.max().item<int64_t>() >= num_train_timesteps)
    fail("loss", "expected t in 0..{}, got {}..{} in {}", num_train_timesteps - 1, t.min().item<int64_t>(),
         t.max().item<int64_t>(), inputs.path());
  return t;
}

// Continuous flow has no table to index.
bool takes_uniforms(const nlohmann::json& config) {
  const DiffusionConfig reader("loss", config);
  return reader.get<std::string>("type", "") == "flow" &&
         reader.get<std::string>("mode", "continuous") == "continuous";
}

void run_loss(const LossOptions& options) {
  const nlohmann::json config = read_config(options.config);
  const auto objective = make_objective(config);
  const Inputs inputs(options.inputs);
  const at::Tensor x_0 = inputs.get("x_start", {-1, -1, -1, -1});
  const at::Tensor noise = inputs.get("noise", x_0.sizes());
  const int64_t batch = x_0.size(0);
  at::Tensor prediction = inputs.get("model_output", {batch, -1, x_0.size(2), x_0.size(3)});
  if (batch < 1) fail("loss", "expected at least one sample in {}", options.inputs);
  const at::Tensor timesteps =
      takes_uniforms(config)
          ? objective->timesteps(inputs.get("u", {batch}).to(at::kDouble))
          : read_indices(inputs, batch,
                         DiffusionConfig("loss", config).positive("num_train_timesteps", 1000));

  const NoisedBatch noised = objective->add_noise(x_0, noise, timesteps);
  prediction = prediction.detach().set_requires_grad(true);
  const LossTerms terms = objective->loss(prediction, x_0, noise, noised);
  const auto gradient = torch::autograd::grad({terms.loss.mean()}, {prediction});
  Tensors outputs = {{"x_t", noised.x_t},       {"model_t", noised.model_t},
                     {"target", noised.target}, {"loss", terms.loss},
                     {"mse", terms.mse},        {"grad_model_output", gradient.at(0)}};
  if (terms.vb.defined()) outputs["vb"] = terms.vb;
  write_outputs(options.outputs, outputs);
}

}  // namespace

void add_loss_verb(CLI::App& app) {
  auto options = std::make_shared<LossOptions>();
  CLI::App* verb = app.add_subcommand("loss", "An objective's loss and gradient for a given model output");
  verb->add_option("--config", options->config, "JSON config of the objective")->required();
  verb->add_option("--inputs", options->inputs, "x_start, noise, model_output, t or u")->required();
  verb->add_option("--outputs", options->outputs, "File to write")->required();
  verb->callback([options] { run_loss(*options); });
}

}  // namespace kiln::conformance
