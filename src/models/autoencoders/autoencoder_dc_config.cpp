#include <algorithm>

#include "core/error.h"
#include "core/json_config.h"
#include "core/text/json_text.h"
#include "models/autoencoders/autoencoder_dc.h"

namespace kiln {
namespace {

constexpr const char* kAutoencoderDc = "autoencoder_dc";

void check_size(const std::string& key, size_t got, size_t expected) {
  if (got != expected)
    fail(kAutoencoderDc, "expected {} to have {} entries, one per block_out_channels, got {}", key, expected,
         got);
}

// Reads one name for all levels or one for each. Returns per level whether the name is `chosen` rather than
// `other`.
std::vector<bool> choices(const JsonConfig& reader, const std::string& key, const std::string& chosen,
                          const std::string& other, bool otherwise, size_t num_levels) {
  if (!reader.has(key)) return std::vector<bool>(num_levels, otherwise);
  std::vector<std::string> names(num_levels);
  if (reader.at(key).is_array())
    names = reader.get(key, names);
  else
    std::ranges::fill(names, reader.get<std::string>(key, ""));
  check_size(key, names.size(), num_levels);
  std::vector<bool> are_chosen;
  for (const std::string& name : names) {
    if (name != chosen && name != other)
      fail(kAutoencoderDc, "config key {} holds {}; only {} and {} are built", key, name, chosen, other);
    are_chosen.push_back(name == chosen);
  }
  return are_chosen;
}

std::vector<std::vector<int64_t>> multiscales(const JsonConfig& reader, const std::string& key) {
  if (!reader.has(key)) return {{}, {}, {}, {5}, {5}, {5}};
  const nlohmann::json& value = reader.at(key);
  std::vector<std::vector<int64_t>> levels;
  for (const nlohmann::json& level : value.is_array() ? value : nlohmann::json::array({0})) {
    const bool is_kernels =
        level.is_array() && std::ranges::all_of(level, [](const nlohmann::json& kernel) {
          return is_integer(kernel) && kernel.get<int64_t>() > 0 && kernel.get<int64_t>() % 2 == 1;
        });
    if (!is_kernels)
      fail(kAutoencoderDc, "expected {} to be lists of odd kernel sizes, got {}", key, brief(value));
    levels.push_back(level.get<std::vector<int64_t>>());
  }
  return levels;
}

DcHalfConfig parse_half(const JsonConfig& reader, const std::string& prefix, std::vector<int64_t> layers) {
  DcHalfConfig half;
  half.widths =
      reader.get(prefix + "block_out_channels", std::vector<int64_t>{128, 256, 512, 512, 1024, 1024});
  half.layers = reader.get(prefix + "layers_per_block", std::move(layers));
  const size_t levels = half.widths.size();
  if (levels < 2) fail(kAutoencoderDc, "expected at least 2 {}block_out_channels, got {}", prefix, levels);
  check_size(prefix + "layers_per_block", half.layers.size(), levels);
  half.is_attention = choices(reader, prefix + "block_types", "EfficientViTBlock", "ResBlock", false, levels);
  half.multiscales = multiscales(reader, prefix + "qkv_multiscales");
  check_size(prefix + "qkv_multiscales", half.multiscales.size(), levels);
  half.is_batch_norm.assign(levels, false);
  half.is_relu.assign(levels, false);
  for (size_t i = 0; i < levels; ++i)
    if (half.widths[i] < 1 || half.layers[i] < (i == 0 ? 0 : 1))
      fail(kAutoencoderDc,
           "expected {0}block_out_channels > 0 and {0}layers_per_block > 0 (the first may be 0)", prefix);
  return half;
}

// Throws Error unless `a` is a multiple of `b`. The parameter-free shortcuts group channels.
void check_multiple(const std::string& what, int64_t a, int64_t b) {
  if (b < 1 || a % b != 0)
    fail(kAutoencoderDc, "{}: expected {} channels to be a multiple of {}", what, a, b);
}

void validate(const AutoencoderDcConfig& c) {
  for (const auto& [name, half] : {std::pair{"encoder", &c.encoder}, std::pair{"decoder", &c.decoder}}) {
    for (size_t i = 0; i < half->widths.size(); ++i) {
      if (half->is_attention[i]) check_multiple(name, half->widths[i], c.head_dim);
      if (i + 1 == half->widths.size() || half->layers[i] == 0) continue;
      check_multiple(name, 4 * half->widths[i], half->widths[i + 1]);
    }
    if (half->shortcut) check_multiple(name, half->widths.back(), c.latent_channels);
  }
  if (c.encoder.widths.size() != c.decoder.widths.size())
    fail(kAutoencoderDc, "expected encoder and decoder to have as many levels, got {} and {}",
         c.encoder.widths.size(), c.decoder.widths.size());
  if (!(c.scaling_factor > 0)) fail(kAutoencoderDc, "expected scaling_factor > 0, got {}", c.scaling_factor);
}

}  // namespace

const nlohmann::json& sana_autoencoder_config() {
  static const std::vector<std::string> blocks = {
      "ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock", "EfficientViTBlock", "EfficientViTBlock"};
  static const nlohmann::json kConfig = {{"_class_name", "AutoencoderDC"},
                                         {"encoder_block_types", blocks},
                                         {"decoder_block_types", blocks},
                                         {"encoder_layers_per_block", {2, 2, 2, 3, 3, 3}},
                                         {"upsample_block_type", "interpolate"},
                                         {"downsample_block_type", "conv"},
                                         {"scaling_factor", 0.41407}};
  return kConfig;
}

AutoencoderDcConfig parse_autoencoder_dc_config(const nlohmann::json& config) {
  const JsonConfig reader(kAutoencoderDc, config);
  AutoencoderDcConfig c;
  c.in_channels = reader.positive("in_channels", c.in_channels);
  c.latent_channels = reader.positive("latent_channels", c.latent_channels);
  c.head_dim = reader.positive("attention_head_dim", c.head_dim);
  c.encoder = parse_half(reader, "encoder_", {2, 2, 2, 3, 3, 3});
  c.decoder = parse_half(reader, "decoder_", {3, 3, 3, 3, 3, 3});
  const size_t levels = c.decoder.widths.size();
  c.decoder.is_batch_norm = choices(reader, "decoder_norm_types", "batch_norm", "rms_norm", false, levels);
  c.decoder.is_relu = choices(reader, "decoder_act_fns", "relu", "silu", false, levels);
  c.encoder.shuffles =
      reader.get<std::string>("downsample_block_type", "pixel_unshuffle") == "pixel_unshuffle";
  c.decoder.shuffles = reader.get<std::string>("upsample_block_type", "pixel_shuffle") != "interpolate";
  c.encoder.shortcut = reader.get("encoder_out_shortcut", true);
  c.decoder.shortcut = reader.get("decoder_in_shortcut", true);
  c.final_relu = reader.choice("decoder_conv_act_fn", "relu", {"relu", "silu"}) == "relu";
  c.scaling_factor = reader.get("scaling_factor", c.scaling_factor);
  validate(c);
  return c;
}

}  // namespace kiln
