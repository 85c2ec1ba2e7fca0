// LoRA adapters in the keys of the programs that write them: PEFT's (adapter_config.json beside the weights),
// diffusers' (pytorch_lora_weights.safetensors) and kohya's (lora_unet_..; what most shared files hold).
#pragma once
#include <nlohmann/json.hpp>

#include <map>
#include <string>
#include <vector>

#include "models/lora.h"

namespace kiln {

enum class LoraFormat { kPeft, kDiffusers, kKohya };

// An adapter of a denoiser's file, whichever of the formats it has. `modules`: the model's layers by the
// names that PEFT gives them; kohya's keys cannot be read without, since they write dots as underscores.
// Parts for text encoders are left out. Throws Error naming what cannot be read.
std::vector<LoraLayer> read_lora(const std::string& path, const std::vector<std::string>& modules);

// Adds an adapter's file to a model's weights (merge_lora). Returns how many layers it changes. Throws Error.
size_t merge_adapter(std::map<std::string, at::Tensor>& weights, const std::string& path);

struct LoraFile {
  std::map<std::string, at::Tensor> tensors;
  nlohmann::json adapter_config;  // of PEFT's format, else null
};
// `prefix`: of diffusers' keys, "unet" or "transformer". Scales: in PEFT's config as rank and alpha (by
// module where they differ), in kohya's as alpha beside each layer; diffusers' keys hold none, so that lora_B
// carries it.
LoraFile write_lora(const std::vector<LoraLayer>& layers, LoraFormat format, const std::string& prefix);

}  // namespace kiln
