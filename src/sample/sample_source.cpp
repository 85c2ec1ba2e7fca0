#include "sample/sample_source.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <span>

#include "checkpoint/tensor_files.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/files/xxh3.h"
#include "core/json_config.h"
#include "diffusion/objective.h"
#include "models/autoencoders/tiling.h"
#include "models/lora_keys.h"
#include "models/registry.h"
#include "models/run_folder.h"
#include "parallel/machine.h"
#include "run/published_settings.h"
#include "sample/sampler_loop.h"

namespace kiln {
namespace {

using nlohmann::json;

std::string fingerprint_of(const std::map<std::string, at::Tensor>& weights) {
  std::string parts;
  for (const auto& [key, tensor] : weights) {
    const at::Tensor bytes = tensor.contiguous();
    parts += key + xxh3_hex(std::span(static_cast<const std::byte*>(bytes.const_data_ptr()), bytes.nbytes()));
  }
  return "xxh3:" + xxh3_hex(std::as_bytes(std::span(parts)));
}

ModelRecord info_of_weights(const SampleCommand& command) {
  ModelRecord info;
  if (command.model.empty()) fail("sample", "--weights needs --model (DiT-XL/2, ...)");
  info.model = command.model;
  info.model_config = read_json_option("sample", "--model-config", command.model_config);
  info.objective = published_objective_config(command.model, command.objective);
  info.autoencoder.name.clear();  // not known
  return info;
}

// Names the average that the weights are. The decay of a weights file is not known.
std::string average_of(const SampleCommand& command, const ModelRecord& info) {
  const bool is_run = !command.run.empty();
  if (command.no_ema || (is_run && info.ema_decays.empty())) return "model";
  return is_run ? fmt::format("ema-{}", command.ema_decay.value_or(info.ema_decays.front())) : "of the file";
}

// Completes the model's config from the shapes in a weights file.
void ask_weights(const std::map<std::string, at::Tensor>& weights, ModelRecord& info) {
  WeightShapes shapes;
  for (const auto& [key, tensor] : weights) shapes[key] = tensor.sizes().vec();
  info.model_config = resolve_denoiser_config(info.model, info.model_config, shapes);
}

std::string autoencoder_path(const SampleCommand& command, const ModelRecord& info) {
  if (!command.autoencoder.empty()) return command.autoencoder;
  if (info.autoencoder.name == "pixels") return "pixels";
  constexpr int64_t kRgb = 3;
  if (!info.autoencoder.name.empty() || info.model_config.value("in_channels", int64_t{0}) != kRgb)
    return info.autoencoder.path;
  fmt::print(stderr,
             "note: the model makes 3 channels, taken for pixels: give --autoencoder if they are latents\n");
  return "pixels";
}

void load_autoencoder_of(const SampleCommand& command, const ModelRecord& info, at::Device device,
                         at::ScalarType compute_dtype, int64_t num_processes, SampleSource& source) {
  const ModelRecord::AutoencoderInfo& trained = info.autoencoder;
  const std::string path = autoencoder_path(command, info);
  std::error_code unreachable;
  if (path.empty() || (path != "pixels" && !std::filesystem::exists(path, unreachable)))
    fail("sample", "{}: pass --autoencoder with the one that made the latents, or pixels",
         path.empty()  ? "no autoencoder is known"
         : unreachable ? fmt::format("{}: {}", path, unreachable.message())
                       : path + " does not exist");
  source.autoencoder =
      load_autoencoder(path, device, compute_dtype,
                       Tiling::parse("tiles", command.tiles, usable_bytes(device, num_processes)));
  const Autoencoder& autoencoder = *source.autoencoder;
  if (trained.name.empty()) return;
  const auto differs = [](double a, double b) { return std::abs(a - b) > 1e-6 * std::abs(b); };
  if (autoencoder.name != trained.name || differs(autoencoder.scaling_factor, trained.scaling_factor) ||
      differs(autoencoder.shift_factor, trained.shift_factor))
    fail("sample",
         "the run's latents come from {} with scaling factor {} and shift {}, but {} is {} with {} and {}",
         trained.name, trained.scaling_factor, trained.shift_factor, path, autoencoder.name,
         autoencoder.scaling_factor, autoencoder.shift_factor);
  if (trained.fingerprint.empty() || autoencoder.fingerprint == trained.fingerprint) return;
  if (command.autoencoder.empty())
    fail("sample",
         "{} holds another autoencoder now than the one that made the run's latents: pass --autoencoder with "
         "that one, or with this one if it decodes them",
         path);
  // Decoders of one latent space exist in variants (sd-vae-ft-ema, -mse), so other weights are not an error.
  fmt::print(stderr, "kiln sample: {} is not the autoencoder that the run's latents were made with\n", path);
}

}  // namespace

SampleSource load_sample_source(const SampleCommand& command, at::Device device, at::ScalarType compute_dtype,
                                int64_t num_processes) {
  if (command.run.empty() == command.weights.empty()) fail("sample", "expected either --run or --weights");
  const bool is_run = !command.run.empty();
  if (is_run && (!command.model.empty() || !command.model_config.empty() || command.image_size > 0))
    fail("sample", "--model, --model-config and --image-size have no effect with --run: the run knows them");
  if (!is_run && command.ema_decay)
    fail("sample", "--ema-decay chooses among a run's averages: --weights has one");
  if (command.no_ema && command.ema_decay) fail("sample", "expected --ema-decay or --no-ema, not both");

  ModelRecord info = is_run ? read_run_info(command.run) : info_of_weights(command);
  SampleSource source;
  source.weights =
      is_run ? run_weights(command.run, info, !command.no_ema, command.ema_decay) : command.weights;
  auto weights =
      is_run ? load_run_weights(info, source.weights) : load_tensors(source.weights, !command.no_ema);
  if (!is_run) ask_weights(weights, info);
  load_autoencoder_of(command, info, device, compute_dtype, num_processes, source);
  if (command.image_size > 0) {
    if (command.image_size % source.autoencoder->downsample != 0)
      fail("sample", "expected --image-size to be a multiple of {}, got {}", source.autoencoder->downsample,
           command.image_size);
    info.model_config["input_size"] = command.image_size / source.autoencoder->downsample;
  }
  source.model = info.model;
  source.model_config = resolve_denoiser_config(info.model, info.model_config);
  if (!command.adapter.empty())
    merge_adapter(weights, command.adapter, {&family_of(info.model), source.model_config});
  source.objective = info.objective;
  source.class_names = info.class_names;
  source.text = info.text;
  source.weights_fingerprint = fingerprint_of(weights);
  source.average = average_of(command, info);
  source.denoiser =
      build_denoiser(info.model, source.model_config, {.device = device, .compute_dtype = compute_dtype});
  load_weights(*source.denoiser, weights, source.weights);
  // A file does not say whether its objective learns sigma; its channels do.
  const DenoiserShape& shape = source.denoiser->shape();
  if (!is_run && source.objective.at("type") == "iddpm")
    source.objective["learn_sigma"] = shape.out_channels > shape.in_channels;
  freeze_weights(*source.denoiser, compute_dtype);
  return source;
}

}  // namespace kiln
