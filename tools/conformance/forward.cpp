// forward: one forward pass of a model, and its parameter gradients with --backward.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>

#include "checkpoint/tensor_files.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "feature_nets.h"
#include "io.h"
#include "model_io.h"
#include "models/autoencoders/autoencoder_dc.h"
#include "models/autoencoders/autoencoder_kl.h"
#include "models/autoencoders/tiling.h"
#include "models/lora.h"
#include "models/text/text_registry.h"
#include "models/weights.h"
#include "text_forward.h"
#include "verbs.h"

namespace kiln::conformance {
namespace {

struct ForwardOptions {
  std::string model, config, weights, inputs, outputs;
  std::string dtype = "f32", adapter;
  bool backward = false;
  Tiles tiles{};  // of an autoencoder; side 0: the whole at once
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

  bool empty() const { return outputs_.empty(); }  // no loss

  // The gradients by key; zeros for parameters that no output depends on.
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

ModelInput read_input(const Inputs& inputs, const DenoiserShape& shape) {
  ModelInput input;
  const int64_t side = shape.size_multiple > 0 ? -1 : shape.input_size;
  input.x_t = inputs.get("x", {-1, shape.in_channels, side, side});
  const int64_t batch = input.x_t.size(0);
  if (batch < 1) fail("forward", "expected at least one sample in {}", inputs.path());
  input.timesteps = inputs.get("t", {batch}).to(at::kFloat);
  input.conditioning = read_conditioning(inputs, {batch}, shape);
  return input;
}

Tensors run_denoiser(const ForwardOptions& options) {
  const LoadedDenoiser loaded = load_denoiser(options.model, options.config, options.weights, options.dtype);
  const auto& denoiser = loaded.denoiser;
  if (!options.adapter.empty()) attach_lora(*denoiser, read_peft_lora(options.adapter));
  const Inputs inputs(options.inputs);
  const ModelInput input = read_input(inputs, denoiser->shape());
  if (!options.backward) {
    const at::NoGradGuard no_grad;
    return {{"output", denoiser->forward(input)}};
  }
  ParameterGradients gradients(denoiser->parameters());
  const at::Tensor output = denoiser->forward(input);
  gradients.add_loss(output, inputs.get("grad_output", output.sizes()));
  Tensors outputs = {{"output", output}};
  for (const auto& [key, gradient] : loaded.in_file_keys(gradients.compute()))
    outputs["grad." + key] = gradient;
  return outputs;
}

// What a half of an autoencoder is given, makes, and is differentiated with.
struct AutoencoderHalf {
  const char *input, *output, *grad_output;
  at::Tensor (Autoencoder::*run)(const at::Tensor&) const;
  at::Tensor (*run_tiled)(const Autoencoder&, const at::Tensor&, const Tiles&);
};

using ParsedAutoencoder = std::unique_ptr<Autoencoder> (*)(const nlohmann::json&, const BuildOptions&);

// An autoencoder of the interface. `weights` gives a file's tensors under the model's keys; `own_key` the
// model's key of a file's.
struct KnownAutoencoder {
  const char* name;
  ParsedAutoencoder build;
  Tensors (*weights)(const Tensors& file);
  std::string (*own_key)(const std::string& key);
  AutoencoderHalf halves[2];
};
constexpr KnownAutoencoder kAutoencoders[] = {
    {"autoencoder_kl",
     [](const nlohmann::json& config, const BuildOptions& options) -> std::unique_ptr<Autoencoder> {
       return std::make_unique<AutoencoderKl>(parse_autoencoder_kl_config(config), options);
     },
     current_autoencoder_kl_weights,
     current_autoencoder_kl_key,
     {{"image", "moments", "grad_moments", &Autoencoder::encode, encode_tiled},
      {"latent", "image", "grad_image", &Autoencoder::decode, decode_tiled}}},
    {"autoencoder_dc",
     [](const nlohmann::json& config, const BuildOptions& options) -> std::unique_ptr<Autoencoder> {
       return std::make_unique<AutoencoderDc>(parse_autoencoder_dc_config(config), options);
     },
     autoencoder_dc_weights,
     [](const std::string& key) { return key; },
     {{"image", "latent", "grad_latent", &Autoencoder::encode, encode_tiled},
      {"latent", "image", "grad_image", &Autoencoder::decode, decode_tiled}}},
};

// An output that no gradient is given for is no part of the loss.
Tensors run_autoencoder(const KnownAutoencoder& known, const ForwardOptions& options) {
  const auto autoencoder = parse_config(options.config, [&](const nlohmann::json& config) {
    return known.build(config, {.compute_dtype = parse_compute_dtype(options.dtype)});
  });
  const Tensors weights = load_tensors(options.weights);
  load_weights(autoencoder->parameters(), known.weights(weights), options.weights);
  const Inputs inputs(options.inputs);
  std::unique_ptr<ParameterGradients> gradients;
  if (options.backward) gradients = std::make_unique<ParameterGradients>(autoencoder->parameters());
  const at::AutoGradMode grad_mode(options.backward);

  Tensors outputs;
  for (const AutoencoderHalf& half : known.halves) {
    if (!inputs.has(half.input)) continue;
    const at::Tensor input = inputs.get(half.input, {-1, -1, -1, -1});
    if (input.size(0) < 1) fail("forward", "expected at least one sample in {}", inputs.path());
    const at::Tensor output = options.tiles.side > 0 ? half.run_tiled(*autoencoder, input, options.tiles)
                                                     : (*autoencoder.*half.run)(input);
    if (gradients && inputs.has(half.grad_output))
      gradients->add_loss(output, inputs.get(half.grad_output, output.sizes()));
    outputs[half.output] = output;
  }
  if (outputs.empty()) fail("forward", "{} needs an image or a latent in {}", known.name, options.inputs);
  if (!gradients) return outputs;
  if (gradients->empty())
    fail("forward", "--backward needs {} with an image or {} with a latent in {}",
         known.halves[0].grad_output, known.halves[1].grad_output, options.inputs);
  const Tensors by_key = gradients->compute();
  for (const auto& [key, weight] : weights) {  // under the file's own keys and shapes
    const auto found = by_key.find(known.own_key(key));
    if (found != by_key.end()) outputs["grad." + key] = found->second.reshape(weight.sizes());
  }
  return outputs;
}

struct FeatureNetRow {
  std::string_view model;
  Tensors (*run)(const FeatureNetRun& run);
};
constexpr FeatureNetRow kFeatureNets[] = {{"inception", run_inception}, {"dinov2", run_dinov2}};

void run_forward(const ForwardOptions& options) {
  const auto refuse = [&](bool given, const char* option, const char* why) {
    if (given) fail("forward", "{} is not for {}: {}", option, options.model, why);
  };
  for (const FeatureNetRow& net : kFeatureNets) {
    if (net.model != options.model) continue;
    refuse(options.backward, "--backward", "it gives features and no gradients");
    refuse(!options.adapter.empty(), "--adapter", "it is for denoisers");
    return write_outputs(options.outputs,
                         net.run({options.config, options.weights, options.inputs, options.dtype}));
  }
  if (is_text_encoder(options.model)) {
    refuse(options.backward, "--backward", "text encoders are not trained");
    refuse(!options.adapter.empty(), "--adapter", "it is for denoisers");
    return write_outputs(options.outputs, run_text_encoder({options.model, options.config, options.weights,
                                                            options.inputs, options.dtype}));
  }
  for (const KnownAutoencoder& known : kAutoencoders) {
    if (options.model != known.name) continue;
    refuse(!options.adapter.empty(), "--adapter", "it is for denoisers");
    refuse(options.tiles.side > 0 && options.backward, "--tile", "with --backward the whole is run at once");
    return write_outputs(options.outputs, run_autoencoder(known, options));
  }
  refuse(options.tiles.side > 0, "--tile", "it is for autoencoders");
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
  verb->add_option(
      "--adapter", options->adapter,
      "LoRA in PEFT's format, with adapter_config.json beside it; --backward then gives its gradients");
  verb->add_flag("--backward", options->backward, "Also write grad.<key> of sum <output, grad_output>");
  CLI::Option* tile =
      verb->add_option("--tile", options->tiles.side, "Autoencoders: side of the tiles in pixels")
          ->check(CLI::PositiveNumber);
  verb->add_option("--tile-stride", options->tiles.stride, "From one tile to the next, in pixels")
      ->check(CLI::PositiveNumber)
      ->needs(tile);
  tile->needs("--tile-stride");
  verb->callback([options] { run_forward(*options); });
}

}  // namespace kiln::conformance
