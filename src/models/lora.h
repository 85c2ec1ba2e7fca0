// LoRA (Hu et al. 2021, "Low-Rank Adaptation of Large Language Models"): reading and writing PEFT's format,
// and attaching adapters to a model or merging them into weights. The layers compute an adapter's output
// themselves (models/parts/layers.h).
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/json.h"
#include "models/model.h"
#include "models/model_options.h"

namespace kiln {

// The change of one layer: scale * up(down(x)).
struct LoraLayer {
  std::string module;     // PEFT's name: the key of the layer's weight without ".weight"
  at::Tensor down;        // (r, in), or (r, in, k, k) of a convolution
  at::Tensor up;          // (out, r), or (out, r, 1, 1) of a convolution
  double scale = 1;       // alpha / r, or alpha / sqrt(r) (rank-stabilised)
  bool is_fresh = false;  // down and up are shapes, whose first values are to be drawn

  std::string down_key() const { return "base_model.model." + module + ".lora_A.weight"; }
  std::string up_key() const { return "base_model.model." + module + ".lora_B.weight"; }
};

// Returns the layers of `tensors`, which have the keys of PEFT's files, with the scales of the
// adapter_config.json. `source` names the file in messages. Throws Error as read_peft_lora() does.
std::vector<LoraLayer> lora_layers(const std::map<std::string, at::Tensor>& tensors,
                                   const nlohmann::json& adapter_config, const std::string& source);
// Returns the rank of a factor `down`; 0 of a tensor without dimensions, which check_factors() refuses.
inline int64_t rank_of(const at::Tensor& down) { return down.dim() > 0 ? down.size(0) : 0; }
// Throws Error naming `source` unless each has a rank of at least 1 and finite values and scale.
void check_factors(const std::vector<LoraLayer>& layers, const std::string& source);
// Returns the adapter_config.json of these layers.
nlohmann::json lora_config(const std::vector<LoraLayer>& layers);

// Reads an adapter in PEFT's format: a .safetensors file with adapter_config.json in its folder, or that
// folder. Throws Error naming anything that is no LoRA of linear layers and convolutions.
std::vector<LoraLayer> read_peft_lora(const std::string& path);

// The weight of a module, and its rows there. Models may hold several modules in one weight.
struct LoraTarget {
  std::string weight_key;
  int64_t first_row = 0, num_rows = 0;  // 0 rows: all
};
using LoraTargetFn = std::function<LoraTarget(const std::string& module)>;
// Returns the weight module + ".weight" with all rows.
LoraTarget whole_weight(const std::string& module);

// Returns the names of the layers that can carry an adapter.
std::vector<std::string> module_names(const SegmentModel& model);
// Returns the layers of a fresh adapter: the model's linear layers and convolutions whose names match the
// options. attach_lora() says how their first values are drawn. Throws Error when the pattern matches none.
std::vector<LoraLayer> fresh_lora(const SegmentModel& model, const LoraOptions& options);

// Adds the adapter to the model's layers, as f32 weights in the segments of those layers, and freezes all
// other weights. Returns the new weights under their keys in the file. Their Init gives the layer's factors,
// or draws those of fresh layers (down as PEFT draws it, up zero). Throws Error for an adapter of
// another base: it names modules that the model lacks, layers that cannot carry an adapter or shapes that do
// not fit.
ParameterList attach_lora(const SegmentModel& model, const std::vector<LoraLayer>& layers, double dropout = 0,
                          const LoraTargetFn& target = whole_weight);

// Adds scale * up * down to the weights, which become f32: rounded, they would draw another picture than the
// base beside its adapter. Throws Error as attach_lora() does.
void merge_lora(std::map<std::string, at::Tensor>& weights, const std::vector<LoraLayer>& layers,
                const LoraTargetFn& target = whole_weight);

}  // namespace kiln
