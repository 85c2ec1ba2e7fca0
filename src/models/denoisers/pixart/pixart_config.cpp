// PixArt's presets and configs in the repository's names.
#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.h"
#include "core/json_config.h"
#include "core/json_fields.h"
#include "models/denoisers/pixart/pixart.h"

namespace kiln {
namespace {

using nlohmann::json;
using KvSampling = PixartConfig::KvSampling;

struct PublishedPixart {
  const char* name;
  int64_t input_size;
  double pe_interpolation;
  int64_t model_max_length;
  bool multi_scale, micro_condition, compresses;
};
// From configs/pixart_{alpha,sigma}_config of the repository. The 256 px models take one size.
constexpr std::array kPublishedPixart = {
    PublishedPixart{"PixArt-Alpha-XL/2-256", 32, 1, 120, false, false, false},
    PublishedPixart{"PixArt-Alpha-XL/2-512", 64, 1, 120, true, false, false},
    PublishedPixart{"PixArt-Alpha-XL/2-1024", 128, 2, 120, true, true, false},
    PublishedPixart{"PixArt-Sigma-XL/2-256", 32, 0.5, 300, false, false, false},
    PublishedPixart{"PixArt-Sigma-XL/2-512", 64, 1, 300, true, false, false},
    PublishedPixart{"PixArt-Sigma-XL/2-1024", 128, 2, 300, true, false, false},
    PublishedPixart{"PixArt-Sigma-XL/2-1024-KvCompress", 128, 2, 300, true, false, true},
    PublishedPixart{"PixArt-Sigma-XL/2-2K", 256, 4, 300, true, false, false},
};
constexpr int64_t kFirstCompressed = 14, kPixartXlDepth = 28, kPixartXlWidth = 1152, kPixartXlHeads = 16;
constexpr int64_t kPixartHeadDim = 64;  // for widths other than the published ones

struct NamedSampling {
  const char* name;
  KvSampling sampling;
};
constexpr std::array kSamplings = {
    NamedSampling{"conv", KvSampling::kConvolution}, NamedSampling{"uniform", KvSampling::kUniform},
    NamedSampling{"ave", KvSampling::kAverage}, NamedSampling{"uniform_every", KvSampling::kEvery}};

void pixart_requires(bool valid, const char* key, const std::string& expected, const std::string& got) {
  if (!valid) fail("pixart", "expected {} {}, got {}", key, expected, got);
}

void read_compression(const json& object, PixartConfig& c) {
  const JsonConfig reader("pixart", object);
  const std::string sampling = reader.choice("sampling", "", {"", "conv", "uniform", "ave", "uniform_every"});
  for (const NamedSampling& known : kSamplings)
    if (sampling == known.name) c.kv_sampling = known.sampling;
  c.kv_factor = reader.positive("scale_factor", 1);
  c.kv_layers = reader.get("kv_compress_layer", std::vector<int64_t>());
  reader.refuse_unknown();
  if (c.kv_factor == 1 || c.kv_layers.empty()) {
    c.kv_sampling = KvSampling::kNone;
    c.kv_factor = 1;
    c.kv_layers.clear();
  } else {
    pixart_requires(c.kv_sampling != KvSampling::kNone, "kv_compress_config.sampling",
                    "to be conv, uniform, ave or uniform_every", "none");
  }
}

void validate(const PixartConfig& c) {
  const std::pair<const char*, int64_t> positive[] = {{"input_size", c.input_size},
                                                      {"patch_size", c.patch_size},
                                                      {"in_channels", c.in_channels},
                                                      {"hidden_size", c.hidden_size},
                                                      {"depth", c.depth},
                                                      {"num_heads", c.num_heads},
                                                      {"caption_channels", c.caption_channels},
                                                      {"model_max_length", c.model_max_length}};
  for (const auto& [key, value] : positive) pixart_requires(value > 0, key, "> 0", std::to_string(value));
  pixart_requires(c.mlp_ratio > 0 && c.mlp_size() > 0, "mlp_ratio", "> 0", fmt::format("{}", c.mlp_ratio));
  pixart_requires(c.pe_interpolation > 0, "pe_interpolation", "> 0", fmt::format("{}", c.pe_interpolation));
  pixart_requires(c.class_dropout_prob >= 0 && c.class_dropout_prob <= 1, "class_dropout_prob", "in [0, 1]",
                  fmt::format("{}", c.class_dropout_prob));
  pixart_requires(c.input_size % c.patch_size == 0, "input_size (a latent's side)",
                  fmt::format("divisible by patch_size {}", c.patch_size), std::to_string(c.input_size));
  pixart_requires(c.hidden_size % c.num_heads == 0, "hidden_size",
                  fmt::format("divisible by num_heads {}", c.num_heads), std::to_string(c.hidden_size));
  pixart_requires(c.hidden_size % 4 == 0, "hidden_size", "divisible by 4 (position table)",
                  std::to_string(c.hidden_size));
  pixart_requires(!c.micro_condition || c.hidden_size % 3 == 0, "hidden_size",
                  "divisible by 3 (micro_condition: height, width and aspect ratio)",
                  std::to_string(c.hidden_size));
  for (const int64_t layer : c.kv_layers)
    pixart_requires(layer >= 0 && layer < c.depth, "kv_compress_layer", fmt::format("in 0..{}", c.depth - 1),
                    std::to_string(layer));
}

// Returns the config of compression: the blocks that have a strided convolution, and its stride.
json compression_of(const WeightShapes& shapes, int64_t depth) {
  json layers = json::array();
  int64_t factor = 1;
  for (int64_t i = 0; i < depth; ++i) {
    const int64_t kernel = dimension_of(shapes, fmt::format("blocks.{}.attn.sr.weight", i), 2);
    if (kernel == 0) continue;
    layers.push_back(i);
    factor = kernel;
  }
  return {{"sampling", "conv"}, {"scale_factor", factor}, {"kv_compress_layer", layers}};
}

int64_t num_heads_of(int64_t hidden_size) {
  return hidden_size == kPixartXlWidth ? kPixartXlHeads : std::max<int64_t>(hidden_size / kPixartHeadDim, 1);
}

}  // namespace

const std::map<std::string, json>& pixart_presets() {
  static const std::map<std::string, json> presets = [] {
    std::map<std::string, json> table = {{"pixart", json::object()}};
    for (const PublishedPixart& model : kPublishedPixart) {
      json& preset = table[model.name];
      preset = {{"variant", model.multi_scale ? "PixArtMS" : "PixArt"},
                {"input_size", model.input_size},
                {"pe_interpolation", model.pe_interpolation},
                {"model_max_length", model.model_max_length},
                {"micro_condition", model.micro_condition}};
      if (!model.compresses) continue;
      json layers = json::array();
      for (int64_t i = kFirstCompressed; i < kPixartXlDepth; ++i) layers.push_back(i);
      preset["kv_compress_config"] = {
          {"sampling", "conv"}, {"scale_factor", 2}, {"kv_compress_layer", layers}};
    }
    return table;
  }();
  return presets;
}

PixartConfig parse_pixart_config(const json& config) {
  const JsonConfig reader("pixart", config);
  PixartConfig c;
  c.multi_scale = reader.choice("variant", "PixArtMS", {"PixArtMS", "PixArt"}) == "PixArtMS";
  KILN_GET_FIELDS(reader, c, input_size, patch_size, in_channels, hidden_size, depth, num_heads, mlp_ratio,
                  pred_sigma, caption_channels, pe_interpolation, model_max_length, class_dropout_prob,
                  micro_condition, qk_norm);
  read_compression(reader.object("kv_compress_config"), c);
  reader.refuse_unknown();
  validate(c);
  pixart_requires(c.multi_scale || !c.micro_condition, "micro_condition", "false for the variant PixArt",
                  "true");
  return c;
}

json to_json(const PixartConfig& c) {
  json config = {{"variant", c.multi_scale ? "PixArtMS" : "PixArt"}};
  KILN_WRITE_FIELDS(config, c, input_size, patch_size, in_channels, hidden_size, depth, num_heads, mlp_ratio,
                    pred_sigma, caption_channels, pe_interpolation, model_max_length, class_dropout_prob,
                    micro_condition, qk_norm);
  for (const NamedSampling& known : kSamplings)
    if (c.kv_sampling == known.sampling)
      config["kv_compress_config"] = {
          {"sampling", known.name}, {"scale_factor", c.kv_factor}, {"kv_compress_layer", c.kv_layers}};
  return config;
}

json complete_pixart_config(const json& config, const WeightShapes& shapes) {
  const auto dimension = [&](const char* key, size_t dim) { return dimension_of(shapes, key, dim); };
  json completed = config;
  const auto tell = [&](const char* key, const json& value) {
    if (!config.contains(key)) completed[key] = value;
  };
  const int64_t width = dimension("x_embedder.proj.weight", 0);  // (D, C, p, p)
  if (width == 0) return completed;
  const int64_t channels = dimension("x_embedder.proj.weight", 1),
                patch = dimension("x_embedder.proj.weight", 2);
  int64_t depth = 0;
  while (shapes.contains(fmt::format("blocks.{}.scale_shift_table", depth))) ++depth;
  tell("hidden_size", width);
  tell("in_channels", channels);
  tell("patch_size", patch);
  tell("depth", depth);
  tell("num_heads", num_heads_of(width));
  double mlp_ratio =
      static_cast<double>(dimension("blocks.0.mlp.fc1.weight", 0)) / static_cast<double>(width);
  // The quotient may be rounded down, and mlp_size() would then be a row short.
  if (static_cast<double>(width) * mlp_ratio < static_cast<double>(dimension("blocks.0.mlp.fc1.weight", 0)))
    mlp_ratio = std::nextafter(mlp_ratio, 1e9);
  tell("mlp_ratio", mlp_ratio);
  tell("pred_sigma", dimension("final_layer.linear.weight", 0) == 2 * patch * patch * channels);
  tell("caption_channels", dimension("y_embedder.y_proj.fc1.weight", 1));
  if (shapes.contains("y_embedder.y_embedding"))
    tell("model_max_length", dimension("y_embedder.y_embedding", 0));
  tell("micro_condition", shapes.contains("csize_embedder.mlp.0.weight"));
  tell("qk_norm", shapes.contains("blocks.0.attn.q_norm.weight"));
  const json compression = compression_of(shapes, depth);
  if (!compression.at("kv_compress_layer").empty()) tell("kv_compress_config", compression);
  const int64_t tokens = dimension("pos_embed", 1);
  const auto grid = static_cast<int64_t>(std::llround(std::sqrt(static_cast<double>(tokens))));
  if (tokens > 0 && grid * grid == tokens) tell("input_size", grid * patch);
  return completed;
}

json fit_pixart_config(const json& config, const ModelNeeds& needs) {
  json fitted = config;
  for (const auto& [key, value] : {std::pair{"hidden_size", needs.hidden_size},
                                   {"depth", needs.depth},
                                   {"num_heads", needs.num_heads},
                                   {"patch_size", needs.patch_size},
                                   {"model_max_length", needs.max_text_rows}})
    if (value > 0) fitted[key] = value;
  if (needs.position_scale > 0) fitted["pe_interpolation"] = needs.position_scale;
  if (!config.contains("input_size")) fitted["input_size"] = needs.side;
  if (config.value("variant", "PixArtMS") == "PixArt") {
    if (!needs.has_one_shape || needs.height != needs.width)
      fail("pixart", "the variant PixArt takes square pictures of one size: choose PixArtMS");
    fitted["input_size"] = needs.height;
  }
  fitted["in_channels"] = needs.channels;
  if (needs.text_width > 0) fitted["caption_channels"] = needs.text_width;
  fitted["pred_sigma"] = needs.learns_sigma;
  if (config.value("micro_condition", false) && !needs.has_image_size)
    fail("pixart", "micro_condition needs the pictures' original sizes, which the data lacks");
  return fitted;
}

}  // namespace kiln
