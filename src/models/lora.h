// LoRA (Hu et al. 2021, "Low-Rank Adaptation of Large Language Models"): files in PEFT's format, and what
// they change. The layers themselves add an adapter's part (models/parts/layers.h).
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/lora_options.h"
#include "models/model.h"

namespace kiln {

// The change of one layer: scale * up(down(x)).
struct LoraLayer {
  std::string module;  // as PEFT names it: the key of its weight without ".weight"
  at::Tensor down;     // (r, in), of a convolution (r, in, k, k)
  at::Tensor up;       // (out, r), of a convolution (out, r, 1, 1)
  double scale = 1;    // alpha / r, or alpha / sqrt(r) (rank-stabilised)

  std::string down_key() const { return "base_model.model." + module + ".lora_A.weight"; }
  std::string up_key() const { return "base_model.model." + module + ".lora_B.weight"; }
};

// The scales that an adapter_config.json gives layers of these modules, whose factors are `tensors` by the
// keys of PEFT's files. `source` names them in messages. Throws Error as the next does.
std::vector<LoraLayer> lora_layers(const std::map<std::string, at::Tensor>& tensors,
                                   const nlohmann::json& adapter_config, const std::string& source);
// The adapter_config.json of layers.
nlohmann::json lora_config(const std::vector<LoraLayer>& layers);

// An adapter in PEFT's format: a .safetensors file with adapter_config.json in its folder, or that folder.
// Throws Error for what is no LoRA of linear layers and convolutions, naming it.
std::vector<LoraLayer> read_peft_lora(const std::string& path);

// Which weight, and which of its rows, a module's name means: models may hold several modules in one weight.
struct LoraTarget {
  std::string weight_key;
  int64_t first_row = 0, num_rows = 0;  // num_rows 0: all
};
using LoraTargetFn = std::function<LoraTarget(const std::string& module)>;
// module + ".weight", all rows.
LoraTarget whole_weight(const std::string& module);

// The names of the layers that may carry an adapter.
std::vector<std::string> module_names(const SegmentModel& model);
// The layers that a fresh adapter of these options has: linear layers and convolutions of the model whose
// name matches. Their factors are shapes on meta, of which attach_lora() draws the first values. Throws Error
// when the pattern matches none.
std::vector<LoraLayer> fresh_lora(const SegmentModel& model, const LoraOptions& options);

// Adds the adapter to the model's layers, as f32 weights of their own in the segments of those layers; from
// now on these alone are trainable, and the others frozen. Returns them, under their keys in the file; their
// Init gives the layer's factors, and fresh ones where those are on meta (down as PEFT draws it, up zero).
// Throws Error listing modules that the model lacks, layers that cannot carry an adapter and shapes that do
// not fit: an adapter of another base.
ParameterList attach_lora(const SegmentModel& model, const std::vector<LoraLayer>& layers, double dropout = 0,
                          const LoraTargetFn& target = whole_weight);

// Adds scale * up * down to the weights, in f32; each keeps its dtype. Throws Error as attach_lora does.
void merge_lora(std::map<std::string, at::Tensor>& weights, const std::vector<LoraLayer>& layers,
                const LoraTargetFn& target = whole_weight);

}  // namespace kiln
