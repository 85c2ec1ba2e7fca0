// DiT (Peebles & Xie 2023, "Scalable Diffusion Models with Transformers"), adaLN-Zero, in the published keys.
// Segments: embed, blocks.0 .. blocks.L-1, final.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "core/json.h"
#include "models/family.h"

namespace kiln {

struct DitConfig {
  int64_t input_size = 32;  // latent height and width
  int64_t patch_size = 2;
  int64_t in_channels = 4;
  int64_t hidden_size = 1152;
  int64_t depth = 28;
  int64_t num_heads = 16;
  double mlp_ratio = 4;
  int64_t num_classes = 1000;
  double class_dropout_prob = 0.1;  // > 0: the label table ends with a row for the null class
  bool learn_sigma = true;          // twice the output channels, the prediction first

  int64_t grid() const { return input_size / patch_size; }
  int64_t num_tokens() const { return grid() * grid(); }
  int64_t mlp_size() const { return static_cast<int64_t>(static_cast<double>(hidden_size) * mlp_ratio); }
  int64_t out_channels() const { return learn_sigma ? 2 * in_channels : in_channels; }
  bool has_null_class() const { return class_dropout_prob > 0; }
  // Rows of the label table. 0: the model is unconditional and has no table. As in the original, the null
  // class alone also has a table.
  int64_t num_labels() const { return num_classes + (has_null_class() ? 1 : 0); }
};

// Settings by name: none for "dit", those of the paper for "DiT-{S,B,L,XL}/{2,4,8}".
const std::map<std::string, nlohmann::json>& dit_presets();

// Throws Error naming an unknown key, a wrong type or values that do not fit together. Keys beginning with
// "_" are ignored.
DitConfig parse_dit_config(const nlohmann::json& config);
nlohmann::json to_json(const DitConfig& config);
// Family::complete. Adds in_channels, learn_sigma and, for a model without classes, class_dropout_prob, where
// `config` lacks them and the shapes of weights determine them. Throws Error when the weights have another
// number of label rows than `config`. That number decides which row is the null class, so it is never
// guessed.
nlohmann::json complete_dit_config(const nlohmann::json& config, const WeightShapes& shapes);
// Family::fit.
nlohmann::json fit_dit_config(const nlohmann::json& config, const ModelNeeds& needs);
// Family::recognise.
std::optional<RecognisedModel> recognise_dit(const WeightShapes& shapes, const nlohmann::json& hints);

// Converts weights to the keys of diffusers' DiTTransformer2DModel. That class keeps a copy of the timestep
// and label embedders in every block, and computes pos_embed instead of reading it. Throws Error for what the
// class cannot express, a changed pos_embed included.
TensorMap dit_to_diffusers(const DitConfig& config, const TensorMap& weights);
nlohmann::json dit_diffusers_config(const DitConfig& config);
// The inverse of dit_to_diffusers(). Throws Error listing missing and unknown keys, and when the embedders of
// the blocks differ.
TensorMap dit_from_diffusers(const DitConfig& config, const TensorMap& weights, const std::string& source);
// Throws Error naming a setting that DiT does not have.
DitConfig parse_dit_diffusers_config(const nlohmann::json& config, const std::string& source);
// Returns these conversions as an entry of Family::formats.
ForeignFormat dit_diffusers_format();

std::unique_ptr<Denoiser> build_dit(const DitConfig& config, const BuildOptions& options);

}  // namespace kiln
