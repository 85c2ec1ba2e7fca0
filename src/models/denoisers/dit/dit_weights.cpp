#include <cmath>

#include "core/error.h"
#include "core/json_config.h"
#include "models/denoisers/dit/dit.h"

namespace kiln {
namespace {

// Facts that shapes alone do not tell.
struct DitHints {
  std::optional<int64_t> input_size{};  // of weights without pos_embed; 32 if not given
  std::optional<int64_t> num_heads{};   // hidden_size / 64 if not given (XL: 16)
  bool has_null_class = true;  // the label table ends with the null class, as in every published checkpoint
};

DitHints parse_hints(const nlohmann::json& known) {
  DitHints hints;
  if (!known.is_object()) return hints;
  const JsonConfig reader("dit", known);
  if (known.contains("input_size")) hints.input_size = reader.get<int64_t>("input_size", 0);
  if (known.contains("num_heads")) hints.num_heads = reader.get<int64_t>("num_heads", 0);
  hints.has_null_class = reader.get("class_dropout_prob", 0.1) > 0;
  return hints;
}

constexpr int64_t kHeadDim = 64;         // of S, B and L
constexpr int64_t kXlHiddenSize = 1152;  // XL has 16 heads of 72
constexpr int64_t kXlNumHeads = 16;
constexpr int64_t kDefaultInputSize = 32;  // 256 x 256 pixels

int64_t num_heads_of(int64_t hidden_size, const DitHints& hints) {
  if (hints.num_heads) return *hints.num_heads;
  if (hidden_size == kXlHiddenSize) return kXlNumHeads;
  if (hidden_size % kHeadDim != 0)
    fail("dit",
         "the weights do not tell how many heads a width of {} has: give --model-config "
         "'{{\"num_heads\": N}}', or --num-heads N to kiln convert",
         hidden_size);
  return hidden_size / kHeadDim;
}

int64_t input_size_of(const std::vector<int64_t>* pos_embed, int64_t patch_size, const DitHints& hints) {
  if (pos_embed == nullptr) return hints.input_size.value_or(kDefaultInputSize);
  const int64_t num_tokens = (*pos_embed)[1];
  const auto grid = static_cast<int64_t>(std::llround(std::sqrt(static_cast<double>(num_tokens))));
  if (grid * grid != num_tokens) fail("dit", "pos_embed has {} tokens: expected a square number", num_tokens);
  return grid * patch_size;
}

// Assumes that the label table ends with the null class unless the hints say otherwise.
std::optional<DitConfig> config_of(const WeightShapes& shapes, const DitHints& hints) {
  const auto* patch = find_shape(shapes, "x_embedder.proj.weight", 4);  // (D, C, p, p)
  const auto* fc1 = find_shape(shapes, "blocks.0.mlp.fc1.weight", 2);   // (mlp, D)
  const auto* adaln = find_shape(shapes, "blocks.0.adaLN_modulation.1.weight", 2);
  const auto* final_linear = find_shape(shapes, "final_layer.linear.weight", 2);  // (p * p * C_out, D)
  if (patch == nullptr || fc1 == nullptr || adaln == nullptr || final_linear == nullptr) return std::nullopt;

  DitConfig config;
  config.hidden_size = (*patch)[0];
  config.in_channels = (*patch)[1];
  config.patch_size = (*patch)[2];
  if (config.hidden_size <= 0 || config.in_channels <= 0 || config.patch_size <= 0)
    fail("dit", "x_embedder.proj.weight is empty");
  config.num_heads = num_heads_of(config.hidden_size, hints);
  config.mlp_ratio = static_cast<double>((*fc1)[0]) / static_cast<double>(config.hidden_size);
  // The quotient may be rounded down, and mlp_size() would then be a row short.
  if (config.mlp_size() < (*fc1)[0]) config.mlp_ratio = std::nextafter(config.mlp_ratio, 1e9);
  config.depth = 0;
  while (shapes.contains(fmt::format("blocks.{}.mlp.fc1.weight", config.depth))) ++config.depth;
  config.input_size = input_size_of(find_shape(shapes, "pos_embed", 3), config.patch_size, hints);

  const auto* labels = find_shape(shapes, "y_embedder.embedding_table.weight", 2);
  config.num_classes = labels == nullptr ? 0 : (*labels)[0] - (hints.has_null_class ? 1 : 0);
  if (labels == nullptr || !hints.has_null_class) config.class_dropout_prob = 0;
  const int64_t per_channel = config.patch_size * config.patch_size;
  const int64_t out_channels = (*final_linear)[0] / per_channel;
  if ((*final_linear)[0] % per_channel != 0 ||
      (out_channels != config.in_channels && out_channels != 2 * config.in_channels))
    fail("dit", "final_layer.linear has {} rows: expected {} (noise alone) or {} (with sigma)",
         (*final_linear)[0], per_channel * config.in_channels, 2 * per_channel * config.in_channels);
  config.learn_sigma = out_channels == 2 * config.in_channels;
  return config;
}

}  // namespace

std::optional<RecognisedModel> recognise_dit(const WeightShapes& shapes, const nlohmann::json& known) {
  const DitHints hints = parse_hints(known);
  const std::optional<DitConfig> config = config_of(shapes, hints);
  if (!config) return std::nullopt;
  RecognisedModel model{.config = to_json(*config), .assumed = {}};
  if (!hints.num_heads) model.assumed.push_back("num_heads");
  return model;
}

}  // namespace kiln
