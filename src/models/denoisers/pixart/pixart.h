// PixArt-alpha and PixArt-Sigma (Chen et al. 2023 and 2024): transformers on text, in the keys of their
// repository or in those of diffusers' PixArtTransformer2DModel. Segments: embed (patches, timestep,
// captions), blocks.0 .. blocks.L-1, final.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/json.h"
#include "models/family.h"
#include "models/model.h"

namespace kiln {

struct PixartConfig {
  // kRepository: fused qkv and kv, pos_embed and y_embedding in the file. kDiffusers: neither.
  enum class Keys { kRepository, kDiffusers };
  // How the keys and values of self attention are thinned out (Sigma, sec. 3.3).
  enum class KvSampling { kNone, kConvolution, kUniform, kAverage, kEvery };

  Keys keys = Keys::kRepository;
  bool multi_scale = true;  // PixArtMS, for any size; else PixArt, whose stored position table fits one size
  int64_t input_size = 32;  // latent side that positions refer to
  int64_t patch_size = 2;
  int64_t in_channels = 4;
  int64_t hidden_size = 1152;
  int64_t depth = 28;
  int64_t num_heads = 16;
  double mlp_ratio = 4;
  bool pred_sigma = true;  // twice the output channels, the prediction first
  int64_t caption_channels = 4096;
  bool projects_captions =
      true;                     // false: captions have hidden_size already (diffusers' caption_channels null)
  double pe_interpolation = 1;  // coordinates are divided by this
  int64_t model_max_length = 120;   // rows of the null caption
  double class_dropout_prob = 0.1;  // probability of the null caption in training
  bool micro_condition = false;     // takes the picture's size and aspect ratio
  bool qk_norm = false;
  double norm_eps = 1e-6;
  KvSampling kv_sampling = KvSampling::kNone;
  int64_t kv_factor = 1;
  std::vector<int64_t> kv_layers{};  // the blocks that thin out keys and values

  int64_t grid() const { return input_size / patch_size; }
  int64_t num_tokens() const { return grid() * grid(); }
  int64_t mlp_size() const { return static_cast<int64_t>(static_cast<double>(hidden_size) * mlp_ratio); }
  int64_t out_channels() const { return pred_sigma ? 2 * in_channels : in_channels; }
  int64_t text_width() const { return projects_captions ? caption_channels : hidden_size; }
  bool has_null_caption() const { return keys == Keys::kRepository; }
  bool thins(int64_t block) const;
};

// Settings by name: none for "pixart", and the published "PixArt-{Alpha,Sigma}-XL/2-{256,512,1024,2K}".
const std::map<std::string, nlohmann::json>& pixart_presets();
// The same for "pixart_diffusers" and the published models in diffusers' keys.
const std::map<std::string, nlohmann::json>& pixart_diffusers_presets();

// Reads a config in the repository's names. Throws Error naming an unknown key, a wrong type or values that
// do not fit together.
PixartConfig parse_pixart_config(const nlohmann::json& config);
nlohmann::json to_json(const PixartConfig& config);
// Adds what `config` lacks and the shapes of weights determine: widths, depth, sigma, qk norm, compressed
// layers, micro-conditions, the null caption's length.
nlohmann::json complete_pixart_config(const nlohmann::json& config, const WeightShapes& shapes);
// Family::fit.
nlohmann::json fit_pixart_config(const nlohmann::json& config, const ModelNeeds& needs);

// Reads the config.json of a PixArtTransformer2DModel. Throws Error for a setting that PixArt does not have.
PixartConfig parse_pixart_diffusers_config(const nlohmann::json& config);
// Writes the config.json. Throws Error for what the class cannot express: qk norm, compression, a fixed size.
nlohmann::json pixart_diffusers_config(const PixartConfig& config);
nlohmann::json complete_pixart_diffusers_config(const nlohmann::json& config, const WeightShapes& shapes);
nlohmann::json fit_pixart_diffusers_config(const nlohmann::json& config, const ModelNeeds& needs);

// Family::recognise, of the repository's keys and of diffusers'.
std::optional<RecognisedModel> recognise_pixart(const WeightShapes& shapes, const nlohmann::json& hints);
std::optional<RecognisedModel> recognise_pixart_diffusers(const WeightShapes& shapes,
                                                          const nlohmann::json& hints);
// Reads and writes diffusers' folder, as an entry of Family::formats.
ForeignFormat pixart_diffusers_format();
// An entry of Family::file_keys. It leaves out the stored position table, of any size, where the model
// computes its own (multi_scale).
FileKeys pixart_file_keys();

std::unique_ptr<Denoiser> build_pixart(const PixartConfig& config, const BuildOptions& options);

}  // namespace kiln
