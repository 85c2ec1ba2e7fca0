// forward: one forward pass of a model, and its parameter gradients with --backward.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>

#include "checkpoint/tensor_files.h"
#include "core/error.h"
#include "core/tensors.h"
#include "io.h"
#include "model_io.h"
#include "models/autoencoders/autoencoder_kl.h"
#include "models/weights.h"
#include "verbs.h"

namespace kiln::conformance {
namespace {

struct ForwardOptions {
  std::string model, config, weights, inputs, outputs;
  std::string dtype = "f32";
  bool backward = false;
};

// Asks autograd for the gradient of sum <output, grad_output> by every trainable parameter.
class ParameterGradients {
 public:
  explicit ParameterGradients(const ParameterList& parameters) {
    for (const auto& parameter : parameters) {
      if (!parameter->trainable) continue;
      parameter->value.set_requires_grad(true);
      keys_.push_back(parameter->key);
      leaves_.push_back(parameter->value);
    }
  }

  void add_loss(const at::Tensor& output, const at::Tensor& grad_output) {
    outputs_.push_back(output);
    grad_outputs_.push_back(grad_output);
  }

  // By key; zeros for parameters that no output depends on.
  Tensors compute() const {
    const auto gradients =
        torch::autograd::grad(outputs_, leaves_, grad_outputs_, /*retain_graph=*/std::nullopt,
                              /*create_graph=*/false, /*allow_unused=*/true);
    Tensors by_key;
    for (size_t i = 0; i < keys_.size(); ++i)
      by_key[keys_[i]] = gradients[i].defined() ? gradients[i] : at::zeros_like(leaves_[i]);
    return by_key;
  }

 private:
  std::vector<std::string> keys_;
  std::vector<at::Tensor> leaves_, outputs_, grad_outputs_;
};

DenoiserInput read_input(const Inputs& inputs, const DenoiserShape& shape) {
  DenoiserInput input;
  input.x_t = inputs.get("x", {-1, shape.in_channels, shape.input_size, shape.input_size});
  const int64_t batch = input.x_t.size(0);
  input.timesteps = inputs.get("t", {batch}).to(at::kFloat);
  if (shape.num_classes > 0) {
    const at::Tensor drop = inputs.has("drop") ? inputs.get("drop", {batch}) : at::Tensor();
    input.class_labels = apply_label_drop(inputs.get("y", {batch}), drop, shape);
  }
  return input;
}

Tensors run_denoiser(const ForwardOptions& options) {
  const auto denoiser =
      load_denoiser(options.model, read_config(options.config), options.weights, options.dtype);
  const Inputs inputs(options.inputs);
  const DenoiserInput input = read_input(inputs, denoiser->shape());
  if (!options.backward) {
    const at::NoGradGuard no_grad;
    return {{"output", denoiser->forward(input)}};
  }
  ParameterGradients gradients(denoiser->parameters());
  const at::Tensor output = denoiser->forward(input);
  gradients.add_loss(output, inputs.get("grad_output", output.sizes()));
  Tensors outputs = {{"output", output}};
  for (const auto& [key, gradient] : gradients.compute()) outputs["grad." + key] = gradient;
  return outputs;
}

Tensors run_autoencoder_kl(const ForwardOptions& options) {
  const AutoencoderKl autoencoder(parse_autoencoder_kl_config(read_config(options.config)),
                                  {.compute_dtype = parse_compute_dtype(options.dtype)});
  const Tensors weights = load_tensors(options.weights);
  load_weights(autoencoder.parameters(), current_autoencoder_kl_weights(weights), options.weights);

  const Inputs inputs(options.inputs);
  if (!inputs.has("image") && !inputs.has("latent"))
    fail("forward", "autoencoder_kl needs an image or a latent in {}", options.inputs);
  std::unique_ptr<ParameterGradients> gradients;
  if (options.backward) gradients = std::make_unique<ParameterGradients>(autoencoder.parameters());
  const at::AutoGradMode grad_mode(options.backward);

  Tensors outputs;
  if (inputs.has("image")) {
    outputs["moments"] = autoencoder.encode(inputs.get("image", {-1, -1, -1, -1}));
    if (gradients)
      gradients->add_loss(outputs["moments"], inputs.get("grad_moments", outputs["moments"].sizes()));
  }
  if (inputs.has("latent")) {
    outputs["image"] = autoencoder.decode(inputs.get("latent", {-1, -1, -1, -1}));
    if (gradients) gradients->add_loss(outputs["image"], inputs.get("grad_image", outputs["image"].sizes()));
  }
  if (gradients) {
    const Tensors by_key = gradients->compute();
    for (const auto& [key, weight] : weights)  // under the file's own keys and shapes
      outputs["grad." + key] = by_key.at(current_autoencoder_kl_key(key)).reshape(weight.sizes());
  }
  return outputs;
}

void run_forward(const ForwardOptions& options) {
  if (options.model == "autoencoder_kl")
    write_outputs(options.outputs, run_autoencoder_kl(options));
  else
    write_outputs(options.outputs, run_denoiser(options));
}

}  // namespace

void add_forward_verb(CLI::App& app) {
  auto options = std::make_shared<ForwardOptions>();
  CLI::App* verb =
      app.add_subcommand("forward", "One forward pass of a model; with --backward its gradients too");
  verb->add_option("--model", options->model, "Model name")->required();
  verb->add_option("--config", options->config, "JSON config of the model")->required();
  verb->add_option("--weights", options->weights, ".safetensors, *.index.json, .pt or .pth")->required();
  verb->add_option("--inputs", options->inputs, "Input tensors")->required();
  verb->add_option("--outputs", options->outputs, "File to write")->required();
  verb->add_option("--dtype", options->dtype, "f32, or bf16 for mixed precision")
      ->check(CLI::IsMember({"f32", "bf16"}));
  verb->add_flag("--backward", options->backward, "Also write grad.<key> of sum <output, grad_output>");
  verb->callback([options] { run_forward(*options); });
}

}  // namespace kiln::conformance
