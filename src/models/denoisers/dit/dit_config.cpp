#include <array>

#include "core/error.h"
#include "core/json_config.h"
#include "core/json_fields.h"
#include "models/denoisers/dit/dit.h"

namespace kiln {
namespace {

struct Width {
  const char* name;
  int64_t depth, hidden_size, num_heads;
};
// Peebles & Xie 2023, table 1.
constexpr std::array kWidths = {Width{"S", 12, 384, 6}, Width{"B", 12, 768, 12}, Width{"L", 24, 1024, 16},
                                Width{"XL", 28, 1152, 16}};
constexpr std::array<int64_t, 3> kPatchSizes = {2, 4, 8};

void require(bool valid, const char* key, const std::string& expected, const std::string& got) {
  if (!valid) fail("dit", "expected {} {}, got {}", key, expected, got);
}

void validate(const DitConfig& c) {
  const std::pair<const char*, int64_t> positive[] = {
      {"input_size", c.input_size},   {"patch_size", c.patch_size}, {"in_channels", c.in_channels},
      {"hidden_size", c.hidden_size}, {"depth", c.depth},           {"num_heads", c.num_heads}};
  for (const auto& [key, value] : positive) require(value > 0, key, "> 0", std::to_string(value));
  require(c.num_classes >= 0, "num_classes", ">= 0", std::to_string(c.num_classes));
  require(c.mlp_ratio > 0 && c.mlp_size() > 0, "mlp_ratio", "> 0", fmt::format("{}", c.mlp_ratio));
  require(c.class_dropout_prob >= 0 && c.class_dropout_prob <= 1, "class_dropout_prob", "in [0, 1]",
          fmt::format("{}", c.class_dropout_prob));
  require(c.input_size % c.patch_size == 0, "input_size (a latent's side)",
          fmt::format("divisible by patch_size {}", c.patch_size), std::to_string(c.input_size));
  require(c.hidden_size % c.num_heads == 0, "hidden_size",
          fmt::format("divisible by num_heads {}", c.num_heads), std::to_string(c.hidden_size));
  require(c.hidden_size % 4 == 0, "hidden_size", "divisible by 4 (position table)",
          std::to_string(c.hidden_size));
}

}  // namespace

const std::map<std::string, nlohmann::json>& dit_presets() {
  static const std::map<std::string, nlohmann::json> presets = [] {
    std::map<std::string, nlohmann::json> table;
    table["dit"] = nlohmann::json::object();
    for (const Width& width : kWidths)
      for (const int64_t patch_size : kPatchSizes)
        table[fmt::format("DiT-{}/{}", width.name, patch_size)] = {{"patch_size", patch_size},
                                                                   {"depth", width.depth},
                                                                   {"hidden_size", width.hidden_size},
                                                                   {"num_heads", width.num_heads},
                                                                   {"mlp_ratio", 4.0}};
    return table;
  }();
  return presets;
}

DitConfig parse_dit_config(const nlohmann::json& config) {
  const JsonConfig reader("dit", config);
  DitConfig c;
  KILN_GET_FIELDS(reader, c, input_size, patch_size, in_channels, hidden_size, depth, num_heads, mlp_ratio,
                  num_classes, class_dropout_prob, learn_sigma);
  reader.refuse_unknown();
  validate(c);
  return c;
}

nlohmann::json to_json(const DitConfig& c) {
  nlohmann::json config;
  KILN_WRITE_FIELDS(config, c, input_size, patch_size, in_channels, hidden_size, depth, num_heads, mlp_ratio,
                    num_classes, learn_sigma, class_dropout_prob);
  return config;
}

nlohmann::json complete_dit_config(const nlohmann::json& config, const WeightShapes& shapes) {
  const auto dimension = [&](const char* key, size_t dim) { return dimension_of(shapes, key, dim); };
  nlohmann::json completed = config;
  const int64_t in_channels = dimension("x_embedder.proj.weight", 1);  // (D, C, p, p)
  if (!config.contains("in_channels") && in_channels > 0) completed["in_channels"] = in_channels;
  const int64_t num_labels = dimension("y_embedder.embedding_table.weight", 0);
  const bool is_unconditional =
      in_channels > 0 && num_labels == 0 && JsonConfig("dit", config).get<int64_t>("num_classes", -1) == 0;
  if (is_unconditional && !config.contains("class_dropout_prob")) completed["class_dropout_prob"] = 0.0;
  const DitConfig c = parse_dit_config(completed);
  const int64_t rows = dimension("final_layer.linear.weight", 0);  // p * p * C_out
  const int64_t rows_without_sigma = c.patch_size * c.patch_size * c.in_channels;
  if (!config.contains("learn_sigma") && rows == rows_without_sigma) completed["learn_sigma"] = false;
  if (num_labels > 0 && num_labels != c.num_labels()) {
    const int64_t num_classes = num_labels - (c.has_null_class() ? 1 : 0);
    fail("dit", "the weights have {} classes{}, the model {}: give --model-config '{{\"num_classes\": {}}}'",
         num_classes, c.has_null_class() ? " and the null class" : "", c.num_classes, num_classes);
  }
  return completed;
}

nlohmann::json fit_dit_config(const nlohmann::json& config, const ModelNeeds& needs) {
  if (needs.text_width > 0)
    fail("dit",
         "DiT takes class labels, the data has captions: choose a text-to-image model, or data without them");
  if (!needs.has_one_shape)
    fail("dit", "DiT takes pictures of one shape, the data has several: extract without buckets");
  if (needs.height != needs.width)
    fail("dit", "DiT takes square pictures, the data has latents of {} x {}", needs.height, needs.width);
  if (needs.position_scale > 0) fail("dit", "--position-scale: DiT's positions have one scale; leave it out");
  nlohmann::json fitted = config;
  for (const auto& [key, value] : {std::pair{"hidden_size", needs.hidden_size},
                                   {"depth", needs.depth},
                                   {"num_heads", needs.num_heads},
                                   {"patch_size", needs.patch_size}})
    if (value > 0) fitted[key] = value;
  fitted["input_size"] = needs.height;
  fitted["in_channels"] = needs.channels;
  fitted["num_classes"] = needs.num_classes;
  fitted["class_dropout_prob"] = needs.num_classes > 0 ? needs.class_dropout_prob : 0.0;
  fitted["learn_sigma"] = needs.learns_sigma;
  return fitted;
}

}  // namespace kiln
