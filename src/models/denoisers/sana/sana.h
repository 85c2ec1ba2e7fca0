// Sana (Xie et al. 2024, 2025): a transformer on text with linear attention, in the keys and config of
// diffusers' SanaTransformer2DModel. Segments: embed (patches, timestep, captions), blocks.0 .. blocks.L-1,
// final.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "core/json.h"
#include "models/family.h"
#include "models/model.h"

namespace kiln {

struct SanaConfig {
  int64_t sample_size = 32;  // latent side that positions refer to
  int64_t patch_size = 1;
  int64_t in_channels = 32;
  int64_t out_channels = 32;
  int64_t num_attention_heads = 70;  // of linear attention
  int64_t attention_head_dim = 32;
  int64_t num_layers = 20;
  int64_t num_cross_attention_heads = 20;
  int64_t cross_attention_head_dim = 112;
  int64_t caption_channels = 2304;
  double mlp_ratio = 2.5;
  bool attention_bias = false;  // of linear attention's q, k and v
  bool qk_norm = false;         // "rms_norm_across_heads" (1.5, Sprint)
  double norm_eps = 1e-6;
  std::optional<double> interpolation_scale{};             // absent: no positions
  bool guidance_embeds = false;                            // takes the guidance scale (Sprint)
  double guidance_embeds_scale = 0.1, timestep_scale = 1;  // used by pipelines, not by the model

  int64_t width() const { return num_attention_heads * attention_head_dim; }
  int64_t cross_width() const { return num_cross_attention_heads * cross_attention_head_dim; }
  int64_t mlp_size() const { return static_cast<int64_t>(mlp_ratio * static_cast<double>(width())); }
  int64_t grid() const { return sample_size / patch_size; }
};

// Settings by name: none for "sana", and the published "Sana-600M", "Sana-1600M" (1024 px), with "-512",
// "-2K", "-4K"; "Sana-1.5-..." and "Sana-Sprint-...".
const std::map<std::string, nlohmann::json>& sana_presets();

// Reads the config.json of a SanaTransformer2DModel. Throws Error naming an unknown key, a wrong type or
// values that do not fit together.
SanaConfig parse_sana_config(const nlohmann::json& config);
nlohmann::json to_json(const SanaConfig& config);
// Adds what `config` lacks and the shapes of weights determine.
nlohmann::json complete_sana_config(const nlohmann::json& config, const WeightShapes& shapes);
// Family::fit.
nlohmann::json fit_sana_config(const nlohmann::json& config, const ModelNeeds& needs);
// Family::recognise, of the repository's keys and of diffusers'.
std::optional<RecognisedModel> recognise_sana(const WeightShapes& shapes, const nlohmann::json& hints);
// Reads the repository's keys, as an entry of Family::file_keys.
FileKeys sana_file_keys();
// Reads and writes diffusers' folder, as an entry of Family::formats.
ForeignFormat sana_diffusers_format();

std::unique_ptr<Denoiser> build_sana(const SanaConfig& config, const BuildOptions& options);

}  // namespace kiln
