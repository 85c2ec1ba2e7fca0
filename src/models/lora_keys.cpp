#include "models/lora_keys.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <utility>

#include "checkpoint/tensor_files.h"
#include "core/aten.h"
#include "core/error.h"
#include "models/registry.h"

namespace kiln {
namespace {

constexpr std::string_view kKohyaPrefix = "lora_unet_";
constexpr std::string_view kTextPrefixes[] = {"lora_te", "text_encoder"};

// The names of a pair of factors. The scale beside them is called kAlpha.
struct PairName {
  std::string_view down, up;
};
constexpr PairName kPairNames[] = {{".lora_A.weight", ".lora_B.weight"},
                                   {".lora.down.weight", ".lora.up.weight"},
                                   {".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"},
                                   {".lora_down.weight", ".lora_up.weight"}};
constexpr std::string_view kAlpha = ".alpha";

std::string underscored(std::string name) {
  std::ranges::replace(name, '.', '_');
  return name;
}

// diffusers' first format names a processor's layers: attn1.processor.to_q_lora.down.
std::string without_processor(std::string stem) {
  const std::string_view middle = ".processor.";
  const size_t at = stem.find(middle);
  if (at == std::string::npos) return stem;
  stem.replace(at, middle.size(), ".");
  if (stem.ends_with("_lora")) stem.resize(stem.size() - 5);
  return stem.ends_with(".to_out") ? stem + ".0" : stem;
}

// Returns the module of a pair's stem, or nothing if the pair belongs to a text encoder.
std::optional<std::string> module_of(std::string stem,
                                     const std::map<std::string, std::string>& by_kohya_name) {
  for (const std::string_view prefix : kTextPrefixes)
    if (stem.starts_with(prefix)) return std::nullopt;
  if (stem.starts_with(kKohyaPrefix)) {
    const auto found = by_kohya_name.find(stem.substr(kKohyaPrefix.size()));
    if (found == by_kohya_name.end())
      fail("lora", "{} names no layer of the model: the adapter is of another base", stem);
    return found->second;
  }
  for (const std::string& component : denoiser_components())  // of which diffusers' keys begin
    if (stem.starts_with(component + ".")) stem = stem.substr(component.size() + 1);
  return without_processor(stem);
}

// Returns alpha / rank of a pair, or 1 where the file has no alpha.
double scale_of(const TensorMap& tensors, const std::string& stem, int64_t rank) {
  const auto alpha = tensors.find(stem + std::string(kAlpha));
  if (alpha == tensors.end()) return 1;
  if (alpha->second.numel() != 1) fail("lora", "{}{} is not one number", stem, kAlpha);
  return alpha->second.to(at::kDouble).item<double>() / static_cast<double>(rank);
}

constexpr std::string_view kWeightEnding = ".weight";

std::vector<std::string> modules_of(const TensorMap& weights) {
  std::vector<std::string> modules;
  for (const auto& [key, weight] : weights)
    if (key.ends_with(kWeightEnding)) modules.push_back(key.substr(0, key.size() - kWeightEnding.size()));
  return modules;
}

// Returns the weights under the names of the family's class in diffusers. Empty if no class has this model.
TensorMap foreign_weights(const LoraBase& base, const TensorMap& weights) {
  if (!base.family || base.family->formats.empty()) return {};
  try {
    return base.family->formats.front().weights_to(base.config, weights);
  } catch (const Error&) {
    return {};
  }
}

bool has_first(const TensorMap& weights, const std::vector<LoraLayer>& layers) {
  return weights.contains(layers.front().module + std::string(kWeightEnding));
}

// Adds the layers to the weights, or where these lack their names to `foreign`, the same weights under
// diffusers' names.
void merge_layers(TensorMap& weights, const std::vector<LoraLayer>& layers, const LoraBase& base,
                  TensorMap foreign) {
  if (has_first(weights, layers) || !has_first(foreign, layers)) return merge_lora(weights, layers);
  merge_lora(foreign, layers);
  const TensorMap merged = base.family->formats.front().weights_from(base.config, foreign, "the model");
  // What the class lacks, such as tables of positions and a null caption, stays.
  for (const auto& [name, value] : merged)
    if (name.ends_with(kWeightEnding)) weights[name] = value;
}

bool is_peft(const std::string& path) {
  const std::filesystem::path given = path;
  const std::filesystem::path folder = std::filesystem::is_directory(given) ? given : given.parent_path();
  return std::filesystem::exists(folder / "adapter_config.json");
}

}  // namespace

std::vector<LoraLayer> read_lora(const std::string& path, const std::vector<std::string>& modules) {
  if (is_peft(path)) return read_peft_lora(path);
  std::map<std::string, std::string> by_kohya_name;
  for (const std::string& module : modules) by_kohya_name[underscored(module)] = module;
  const TensorMap tensors = load_tensors(path);
  std::vector<LoraLayer> layers;
  std::set<std::string> used;
  for (const auto& [key, down] : tensors) {
    for (const PairName& names : kPairNames) {
      if (!key.ends_with(names.down)) continue;
      const std::string stem = key.substr(0, key.size() - names.down.size());
      const std::string up_key = stem + std::string(names.up);
      const auto up = tensors.find(up_key);
      if (up == tensors.end()) fail("lora", "{} has {} but not {}", path, key, up_key);
      used.insert({key, up_key, stem + std::string(kAlpha)});
      if (const auto module = module_of(stem, by_kohya_name))
        layers.push_back({.module = *module,
                          .down = down,
                          .up = up->second,
                          .scale = scale_of(tensors, stem, rank_of(down))});
    }
  }
  for (const auto& [key, tensor] : tensors)
    if (!used.contains(key)) fail("lora", "{} holds {}, which is no part of a pair of factors", path, key);
  if (layers.empty()) fail("lora", "{} holds no adapter of a denoiser", path);
  check_factors(layers, path);
  return layers;
}

void merge_layers(TensorMap& weights, const std::vector<LoraLayer>& layers, const LoraBase& base) {
  merge_layers(weights, layers, base,
               has_first(weights, layers) ? TensorMap() : foreign_weights(base, weights));
}

size_t merge_adapter(TensorMap& weights, const std::string& path, const LoraBase& base) {
  TensorMap foreign = foreign_weights(base, weights);
  std::vector<std::string> modules = modules_of(weights);
  for (const std::string& module : modules_of(foreign)) modules.push_back(module);
  const std::vector<LoraLayer> layers = read_lora(path, modules);
  merge_layers(weights, layers, base, std::move(foreign));
  return layers.size();
}

LoraFile write_lora(const std::vector<LoraLayer>& layers, LoraFormat format, const std::string& prefix) {
  const at::NoGradGuard no_grad;
  if (layers.empty()) fail("lora", "there are no layers to write");
  LoraFile file;
  for (const LoraLayer& layer : layers) {
    const double alpha = layer.scale * static_cast<double>(layer.down.size(0));
    switch (format) {
      case LoraFormat::kPeft:
        file.tensors[layer.down_key()] = layer.down;
        file.tensors[layer.up_key()] = layer.up;
        break;
      case LoraFormat::kDiffusers: {
        const std::string stem = prefix + "." + layer.module;
        file.tensors[stem + ".lora_A.weight"] = layer.down;
        file.tensors[stem + ".lora_B.weight"] =
            (layer.up.to(at::kFloat) * layer.scale).to(layer.up.scalar_type());
        break;
      }
      case LoraFormat::kKohya: {
        const std::string stem = std::string(kKohyaPrefix) + underscored(layer.module);
        file.tensors[stem + ".lora_down.weight"] = layer.down;
        file.tensors[stem + ".lora_up.weight"] = layer.up;
        file.tensors[stem + std::string(kAlpha)] = at::scalar_tensor(alpha, at::kFloat);
        break;
      }
    }
  }
  if (format == LoraFormat::kPeft) file.adapter_config = lora_config(layers);
  return file;
}

}  // namespace kiln
