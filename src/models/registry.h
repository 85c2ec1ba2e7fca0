// Every model by name: an explicit table. The config is JSON: a name's preset, overridden by the given keys.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/model.h"

namespace kiln {

// Tensors are created on `device` in f32 and not initialised: initialize_weights() or load_weights() follows.
// `compute_dtype`: what matrix products and convolutions run in; norms, softmax and the residual stream stay f32.
struct BuildOptions {
  at::Device device = at::kCPU;
  at::ScalarType compute_dtype = at::kFloat;
};

// name: "dit" with a full config, or "DiT-XL/2" etc. Throws Error listing the known names.
std::unique_ptr<Denoiser> build_denoiser(const std::string& name, const nlohmann::json& config,
                                         const BuildOptions& options = {});
// The full config that `name` and `config` resolve to (what is saved with a run).
nlohmann::json resolve_denoiser_config(const std::string& name, const nlohmann::json& config);
std::vector<std::string> denoiser_names();

void initialize_weights(const Denoiser& denoiser, uint64_t seed);
// Copies by key. Missing keys, unknown keys and wrong shapes are all listed in one Error. Keys that a model declares
// optional (DiT's pos_embed) may be absent.
void load_weights(const Denoiser& denoiser, const std::map<std::string, at::Tensor>& weights, const std::string& source);

}  // namespace kiln
