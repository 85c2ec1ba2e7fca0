#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "models/features/dinov2.h"

namespace kiln {
namespace {

using Weights = std::map<std::string, at::Tensor>;

struct Renaming {
  const char *part, *name;
};
// The names of transformers 5 for modules within a layer.
constexpr Renaming kTransformers5[] = {{".attention.q_proj.", ".attention.attention.query."},
                                       {".attention.k_proj.", ".attention.attention.key."},
                                       {".attention.v_proj.", ".attention.attention.value."},
                                       {".attention.o_proj.", ".attention.output.dense."},
                                       {".mlp.down_proj.", ".mlp.weights_out."}};
// The names of the original repository.
constexpr Renaming kOriginal[] = {{"patch_embed.proj.", "embeddings.patch_embeddings.projection."},
                                  {"pos_embed", "embeddings.position_embeddings"},
                                  {"cls_token", "embeddings.cls_token"},
                                  {"register_tokens", "embeddings.register_tokens"},
                                  {"mask_token", "embeddings.mask_token"},
                                  {"blocks.", "encoder.layer."},
                                  {".attn.proj.", ".attention.output.dense."},
                                  {".ls1.gamma", ".layer_scale1.lambda1"},
                                  {".ls2.gamma", ".layer_scale2.lambda1"},
                                  {".mlp.w12.", ".mlp.weights_in."},
                                  {".mlp.w3.", ".mlp.weights_out."}};

template <size_t N>
std::string renamed(std::string key, const Renaming (&renamings)[N]) {
  for (const Renaming& renaming : renamings)
    if (const size_t at = key.find(renaming.part); at != key.npos)
      key.replace(at, std::string_view(renaming.part).size(), renaming.name);
  return key;
}

Weights from_original(const Weights& weights) {
  Weights result;
  for (const auto& [key, value] : weights) {
    std::string name = key.starts_with("norm.") ? "layernorm." + key.substr(5) : renamed(key, kOriginal);
    const size_t at = name.find(".attn.qkv.");
    if (at == name.npos) {
      result[name] = value;
      continue;
    }
    const auto thirds = value.chunk(3, 0);
    constexpr const char* kParts[] = {"query", "key", "value"};
    for (size_t i = 0; i < thirds.size() && i < 3; ++i)
      result[name.substr(0, at) + ".attention.attention." + kParts[i] + name.substr(at + 9)] = thirds[i];
  }
  return result;
}

// Renames keys of transformers 4 and 5. Joins the gate of an MLP and the projection that it gates, the gate's
// rows first.
Weights from_transformers(const Weights& weights) {
  Weights result;
  for (const auto& [key, value] : weights) {
    const std::string name = renamed(key.starts_with("dinov2.") ? key.substr(7) : key, kTransformers5);
    const size_t gate = name.find(".mlp.gate_proj."), up = name.find(".mlp.up_proj.");
    if (up != name.npos) continue;
    if (gate == name.npos) {
      result[name] = value;
      continue;
    }
    std::string partner = key;
    partner.replace(partner.find("gate_proj"), 9, "up_proj");
    const auto found = weights.find(partner);
    if (found == weights.end()) fail("dinov2", "the weights have {} but not {}", key, partner);
    result[name.substr(0, gate) + ".mlp.weights_in." + name.substr(gate + 15)] =
        at::cat({value, found->second});
  }
  return result;
}

}  // namespace

Weights dinov2_weights(const Weights& weights) {
  Weights result = weights.contains("pos_embed") ? from_original(weights) : from_transformers(weights);
  result.erase("embeddings.mask_token");  // used in pre-training only
  return result;
}

Dinov2Config dinov2_config_of(const Weights& weights, const std::string& source) {
  const auto shape = [&](const std::string& key) {
    const auto found = weights.find(key);
    if (found == weights.end())
      fail("dinov2", "{} does not hold DINOv2's weights: {} is missing", source, key);
    return found->second.sizes();
  };
  const at::IntArrayRef projection = shape("embeddings.patch_embeddings.projection.weight"),
                        positions = shape("embeddings.position_embeddings");
  if (projection.size() != 4 || positions.size() != 3 || projection[0] % 64 != 0)
    fail("dinov2", "{} does not hold DINOv2's weights: unknown shapes", source);
  Dinov2Config config;
  config.hidden_size = projection[0];
  config.num_heads = projection[0] / 64;
  config.patch_size = projection[2];
  config.image_size = static_cast<int64_t>(std::llround(std::sqrt(static_cast<double>(positions[1] - 1)))) *
                      config.patch_size;
  config.depth = 0;
  while (weights.contains(fmt::format("encoder.layer.{}.norm1.weight", config.depth))) ++config.depth;
  config.swiglu = weights.contains("encoder.layer.0.mlp.weights_in.weight");
  config.qkv_bias = weights.contains("encoder.layer.0.attention.attention.query.bias");
  if (const auto found = weights.find("embeddings.register_tokens"); found != weights.end()) {
    config.has_registers = true;
    config.num_registers = found->second.size(1);
  }
  return config;
}

}  // namespace kiln
