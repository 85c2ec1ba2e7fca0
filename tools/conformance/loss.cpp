// loss: an objective's noised input, target, loss and gradient for a given model output.
#include <torch/csrc/autograd/autograd.h>

#include <memory>

#include "core/aten.h"
#include "core/error.h"
#include "io.h"
#include "objective_io.h"
#include "verbs.h"

namespace kiln::conformance {
namespace {

struct LossOptions {
  std::string config, inputs, outputs;
};

// Returns the target of another sample for each: of sample `negative`, or else of the one before, cyclic.
at::Tensor other_target(const Inputs& inputs, const at::Tensor& target) {
  if (!inputs.has("negative")) return target.roll(/*shifts=*/1, /*dims=*/0);
  const int64_t batch = target.size(0);
  const at::Tensor negative = inputs.get_integers("negative", {batch});
  const int64_t first = negative.min().item<int64_t>(), last = negative.max().item<int64_t>();
  if (first < 0 || last >= batch)
    fail("loss", "expected negative in 0..{}, got {}..{} in {}", batch - 1, first, last, inputs.path());
  return target.index_select(0, negative);
}

void run_loss(const LossOptions& options) {
  const RecordedObjective recorded = parse_config(options.config, parse_objective);
  const Objective& objective = *recorded.objective;
  const Inputs inputs(options.inputs);
  const at::Tensor x_0 = inputs.get("x_start", {-1, -1, -1, -1});
  const at::Tensor noise = inputs.get("noise", x_0.sizes());
  const int64_t batch = x_0.size(0);
  if (x_0.numel() < 1) fail("loss", "expected at least one sample in {}", options.inputs);
  at::Tensor prediction = inputs.get("model_output", {batch, -1, x_0.size(2), x_0.size(3)});

  NoisedBatch noised = objective.add_noise(x_0, noise, recorded.timesteps(inputs, {batch}));
  if (objective.compares_samples()) noised.other_target = other_target(inputs, noised.target);
  prediction = prediction.detach().set_requires_grad(true);
  const LossTerms terms = objective.loss(prediction, x_0, noise, noised);
  const auto gradient = torch::autograd::grad({terms.loss.mean()}, {prediction});
  Tensors outputs = {{"x_t", noised.x_t},
                     {"model_t", noised.model_t},
                     {"target", noised.target},
                     {"loss", terms.loss},
                     {"grad_model_output", gradient.at(0)}};
  // A fixed sigma adds no bound to the loss, and iddpm's outputs are the same whichever sigma it has.
  if (recorded.is_iddpm) outputs["vb"] = at::zeros_like(terms.loss);
  const std::vector<std::string> names = objective.term_names();
  for (size_t i = 0; i < names.size(); ++i) outputs[names[i]] = terms.terms.at(i);
  write_outputs(options.outputs, outputs);
}

}  // namespace

void add_loss_verb(CLI::App& app) {
  auto options = std::make_shared<LossOptions>();
  CLI::App* verb = app.add_subcommand("loss", "An objective's loss and gradient for a given model output");
  verb->add_option("--config", options->config, "JSON config of the objective")->required();
  verb->add_option("--inputs", options->inputs, "x_start, noise, model_output, t or u; optional: negative")
      ->required();
  verb->add_option("--outputs", options->outputs, "File to write")->required();
  verb->callback([options] { run_loss(*options); });
}

}  // namespace kiln::conformance
