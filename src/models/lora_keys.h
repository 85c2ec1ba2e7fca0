// LoRA adapters in the keys of the programs that write them: PEFT's (adapter_config.json beside the weights),
// diffusers' (pytorch_lora_weights.safetensors) and kohya's (lora_unet_..; what most shared files hold).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/json.h"
#include "models/family.h"
#include "models/lora.h"

namespace kiln {

enum class LoraFormat { kPeft, kDiffusers, kKohya };

// Reads a denoiser's adapter in any of the formats. `modules`: PEFT's names of the model's layers; kohya's
// keys cannot be read without them, since they write dots as underscores. Parts for text encoders are left
// out. Throws Error naming what cannot be read.
std::vector<LoraLayer> read_lora(const std::string& path, const std::vector<std::string>& modules);

// The model that an adapter is merged into. Without a family only its own names of layers are known.
struct LoraBase {
  const Family* family = nullptr;
  nlohmann::json config{};
};

// Merges layers, which have the names of the model or of its class in diffusers. Throws Error as
// merge_lora().
void merge_layers(TensorMap& weights, const std::vector<LoraLayer>& layers, const LoraBase& base);
// Merges an adapter's file likewise. Returns the number of changed layers. Throws Error.
size_t merge_adapter(TensorMap& weights, const std::string& path, const LoraBase& base);

struct LoraFile {
  std::map<std::string, at::Tensor> tensors;
  nlohmann::json adapter_config;  // null unless the format is PEFT's
};
// Converts layers to a file's tensors. `prefix`: "unet" or "transformer", for diffusers' keys. PEFT's config
// holds the scale as rank and alpha, by module where they differ; kohya's format has an alpha beside each
// layer. diffusers' keys have no place for the scale, so lora_B is multiplied by it.
LoraFile write_lora(const std::vector<LoraLayer>& layers, LoraFormat format, const std::string& prefix);

}  // namespace kiln
