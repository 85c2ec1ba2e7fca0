#include "models/autoencoders/autoencoder_kl.h"

#include <fmt/ranges.h>

#include <cmath>
#include <optional>

#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "core/json_fields.h"
#include "models/parts/layers.h"
#include "models/weights.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace kiln {

namespace {

constexpr double kGroupNormEps = 1e-6;

// Arguments that every part is built with.
struct Build {
  const AutoencoderKlConfig& config;
  at::ScalarType dtype;  // of activations

  GroupNorm norm(const ParameterScope& scope, const std::string& name, int64_t channels) const {
    return scope.group_norm(name, channels, config.norm_num_groups, kGroupNormEps);
  }
};

struct Resnet {
  GroupNorm norm1, norm2;
  Conv2d conv1, conv2;
  std::optional<Conv2d> shortcut;  // when the number of channels changes

  Resnet(const Build& build, const ParameterScope& scope, int64_t in, int64_t out)
      : norm1(build.norm(scope, "norm1", in)),
        norm2(build.norm(scope, "norm2", out)),
        conv1(scope.conv2d("conv1", in, out, 3, 1, 1)),
        conv2(scope.conv2d("conv2", out, out, 3, 1, 1)) {
    if (in != out) shortcut = scope.conv2d("conv_shortcut", in, out, 1);
  }

  at::Tensor forward(const at::Tensor& x, at::ScalarType dtype) const {
    const at::Tensor hidden = conv1.forward(norm1.forward(x, /*silu=*/true), dtype);
    const at::Tensor residual = conv2.forward(norm2.forward(hidden, /*silu=*/true), dtype);
    return (shortcut ? shortcut->forward(x, dtype) : x) + residual;
  }
};

// Self-attention of one head over all positions.
struct MidAttention {
  GroupNorm norm;
  Linear to_q, to_k, to_v, to_out;

  MidAttention(const Build& build, const ParameterScope& scope, int64_t channels)
      : norm(build.norm(scope, "group_norm", channels)),
        to_q(scope.uniform_linear("to_q", channels, channels)),
        to_k(scope.uniform_linear("to_k", channels, channels)),
        to_v(scope.uniform_linear("to_v", channels, channels)),
        to_out(scope.uniform_linear("to_out.0", channels, channels)) {}

  at::Tensor forward(const at::Tensor& x, at::ScalarType dtype) const {
    const int64_t batch = x.size(0), channels = x.size(1);
    const at::Tensor tokens =
        norm.forward(x, /*silu=*/false).permute({0, 2, 3, 1}).flatten(1, 2);  // (B, N, C)
    const at::Tensor q = to_q.forward(tokens, dtype).unsqueeze(1);            // (B, 1, N, C)
    const at::Tensor k = to_k.forward(tokens, dtype).unsqueeze(1);
    const at::Tensor v = to_v.forward(tokens, dtype).unsqueeze(1);
    const at::Tensor attended = ops::fused_attention(q, k, v).squeeze(1);
    const at::Tensor out = to_out.forward(attended, dtype);
    return x + out.view({batch, x.size(2), x.size(3), channels}).permute({0, 3, 1, 2});
  }
};

struct MidBlock {
  Resnet resnet0;
  std::optional<MidAttention> attention;
  Resnet resnet1;

  MidBlock(const Build& build, const ParameterScope& scope, int64_t channels)
      : resnet0(build, scope.under("resnets.0"), channels, channels),
        attention(build.config.mid_block_add_attention
                      ? std::optional(MidAttention(build, scope.under("attentions.0"), channels))
                      : std::nullopt),
        resnet1(build, scope.under("resnets.1"), channels, channels) {}

  at::Tensor forward(at::Tensor x, at::ScalarType dtype) const {
    x = resnet0.forward(x, dtype);
    if (attention) x = attention->forward(x, dtype);
    return resnet1.forward(x, dtype);
  }
};

// Resnets, then a convolution that halves or doubles the size. The last level has no such convolution.
struct Level {
  std::vector<Resnet> resnets;
  std::optional<Conv2d> resample;

  Level(const Build& build, const ParameterScope& scope, int64_t in, int64_t out, int64_t num_resnets) {
    for (int64_t i = 0; i < num_resnets; ++i)
      resnets.emplace_back(build, scope.under("resnets." + std::to_string(i)), i == 0 ? in : out, out);
  }

  at::Tensor forward_resnets(at::Tensor x, at::ScalarType dtype) const {
    for (const Resnet& resnet : resnets) x = resnet.forward(x, dtype);
    return x;
  }
};

// The names of attention weights in the keys of the two generations of files.
struct AttentionName {
  const char *old_name, *name;
};
constexpr AttentionName kAttentionNames[] = {
    {".query.", ".to_q."}, {".key.", ".to_k."}, {".value.", ".to_v."}, {".proj_attn.", ".to_out.0."}};

std::string renamed_attention(const std::string& key, const char* AttentionName::*from,
                              const char* AttentionName::*to) {
  if (key.find(".attentions.") == std::string::npos) return key;
  for (const AttentionName& names : kAttentionNames) {
    const std::string_view part = names.*from;
    const size_t at = key.find(part);
    if (at != std::string::npos) return std::string(key).replace(at, part.size(), names.*to);
  }
  return key;
}

at::Tensor channels_last(const at::Tensor& x, at::ScalarType dtype) {
  return x.to(dtype).contiguous(at::MemoryFormat::ChannelsLast);
}

constexpr const char* kWho = "autoencoder_kl";

// Checks that there is one block type per level, each of the only kind that is built.
void check_block_types(const JsonConfig& reader, const char* key, const std::string& expected,
                       size_t num_levels) {
  const auto types = reader.get(key, std::vector<std::string>(num_levels, expected));
  for (const std::string& type : types)
    if (type != expected) fail(kWho, "config key {} holds {}; only {} is built", key, type, expected);
  if (types.size() != num_levels)
    fail(kWho, "expected {} {}, one per block_out_channels, got {}", num_levels, key, types.size());
}

}  // namespace

struct AutoencoderKl::Encoder {
  at::ScalarType dtype;
  Conv2d conv_in;
  std::vector<Level> levels;
  std::optional<MidBlock> mid;
  GroupNorm norm_out;
  Conv2d conv_out;
  std::optional<Conv2d> quant_conv;

  Encoder(const Build& build, const ParameterScope& scope, const ParameterScope& root) : dtype(build.dtype) {
    const AutoencoderKlConfig& config = build.config;
    const std::vector<int64_t>& widths = config.block_out_channels;
    conv_in = scope.conv2d("conv_in", config.in_channels, widths.front(), 3, 1, 1);
    for (size_t i = 0; i < widths.size(); ++i) {
      const ParameterScope level = scope.under("down_blocks." + std::to_string(i));
      levels.emplace_back(build, level, widths[i == 0 ? 0 : i - 1], widths[i], config.layers_per_block);
      if (i + 1 < widths.size())
        levels.back().resample = level.conv2d("downsamplers.0.conv", widths[i], widths[i], 3, /*stride=*/2);
    }
    mid.emplace(build, scope.under("mid_block"), widths.back());
    norm_out = build.norm(scope, "conv_norm_out", widths.back());
    const int64_t moments = 2 * config.latent_channels;
    conv_out = scope.conv2d("conv_out", widths.back(), moments, 3, 1, 1);
    if (config.use_quant_conv) quant_conv = root.conv2d("quant_conv", moments, moments, 1);
  }

  at::Tensor forward(const at::Tensor& images) const {
    at::Tensor x = conv_in.forward(channels_last(images, dtype), dtype);
    for (const Level& level : levels) {
      x = level.forward_resnets(x, dtype);
      // Pads one column and one row of zeros, at the right and the bottom only.
      if (level.resample) x = level.resample->forward(at::constant_pad_nd(x, {0, 1, 0, 1}), dtype);
    }
    x = conv_out.forward(norm_out.forward(mid->forward(x, dtype), /*silu=*/true), dtype);
    return quant_conv ? quant_conv->forward(x, dtype) : x;
  }
};

struct AutoencoderKl::Decoder {
  at::ScalarType dtype;
  Conv2d conv_in;
  std::vector<Level> levels;
  std::optional<MidBlock> mid;
  GroupNorm norm_out;
  Conv2d conv_out;
  std::optional<Conv2d> post_quant_conv;

  Decoder(const Build& build, const ParameterScope& scope, const ParameterScope& root) : dtype(build.dtype) {
    const AutoencoderKlConfig& config = build.config;
    const std::vector<int64_t> widths(config.block_out_channels.rbegin(), config.block_out_channels.rend());
    conv_in = scope.conv2d("conv_in", config.latent_channels, widths.front(), 3, 1, 1);
    for (size_t i = 0; i < widths.size(); ++i) {
      const ParameterScope level = scope.under("up_blocks." + std::to_string(i));
      levels.emplace_back(build, level, widths[i == 0 ? 0 : i - 1], widths[i], config.layers_per_block + 1);
      if (i + 1 < widths.size())
        levels.back().resample = level.conv2d("upsamplers.0.conv", widths[i], widths[i], 3, 1, 1);
    }
    mid.emplace(build, scope.under("mid_block"), widths.front());
    norm_out = build.norm(scope, "conv_norm_out", widths.back());
    conv_out = scope.conv2d("conv_out", widths.back(), config.out_channels, 3, 1, 1);
    if (config.use_post_quant_conv)
      post_quant_conv = root.conv2d("post_quant_conv", config.latent_channels, config.latent_channels, 1);
  }

  at::Tensor forward(const at::Tensor& raw_latents) const {
    at::Tensor x = channels_last(raw_latents, dtype);
    if (post_quant_conv) x = post_quant_conv->forward(x, dtype);
    x = mid->forward(conv_in.forward(x, dtype), dtype);
    for (const Level& level : levels) {
      x = level.forward_resnets(x, dtype);
      if (level.resample)
        x = level.resample->forward(at::upsample_nearest2d(x, {2 * x.size(2), 2 * x.size(3)}), dtype);
    }
    return conv_out.forward(norm_out.forward(x, /*silu=*/true), dtype);
  }
};

std::string current_autoencoder_kl_key(const std::string& key) {
  return renamed_attention(key, &AttentionName::old_name, &AttentionName::name);
}
std::string first_autoencoder_kl_key(const std::string& key) {
  return renamed_attention(key, &AttentionName::name, &AttentionName::old_name);
}

std::map<std::string, at::Tensor> current_autoencoder_kl_weights(
    const std::map<std::string, at::Tensor>& weights) {
  std::map<std::string, at::Tensor> current;
  for (const auto& [key, weight] : weights) {
    const bool is_1x1_conv = weight.dim() == 4 && weight.size(2) == 1 && weight.size(3) == 1;
    current[current_autoencoder_kl_key(key)] =
        is_1x1_conv && key.find(".attentions.") != std::string::npos ? weight.flatten(1) : weight;
  }
  return current;
}

AutoencoderKl::AutoencoderKl(const AutoencoderKlConfig& config, const BuildOptions& options)
    : in_channels_(config.in_channels),
      compute_dtype_(ops::product_dtype(options.device, options.compute_dtype)) {
  name = "autoencoder_kl";
  latent_channels = config.latent_channels;
  downsample = int64_t{1} << (config.block_out_channels.size() - 1);
  scaling_factor = config.scaling_factor;
  shift_factor = config.shift_factor;
  const Build build{config, compute_dtype_};
  const ParameterScope root(parameters_, options);
  encoder_ = std::make_unique<const Encoder>(build, root.under("encoder"), root);
  decoder_ = std::make_unique<const Decoder>(build, root.under("decoder"), root);
}

AutoencoderKl::~AutoencoderKl() = default;

at::Tensor AutoencoderKl::encode(const at::Tensor& images) const {
  if (images.dim() != 4 || images.size(1) != in_channels_ || images.size(2) < downsample ||
      images.size(3) < downsample)
    fail("autoencoder_kl", "expected images (B, {}, H, W) with sides of at least {}, got ({})", in_channels_,
         downsample, fmt::join(images.sizes(), ", "));
  return encoder_->forward(images).to(at::kFloat).contiguous();
}

at::Tensor AutoencoderKl::decode(const at::Tensor& raw_latents) const {
  if (raw_latents.dim() != 4 || raw_latents.size(1) != latent_channels)
    fail("autoencoder_kl", "expected latents (B, {}, h, w), got ({})", latent_channels,
         fmt::join(raw_latents.sizes(), ", "));
  return decoder_->forward(raw_latents).to(at::kFloat).contiguous();
}

void AutoencoderKl::freeze_weights() { freeze_convolution_weights(parameters_, compute_dtype_); }

const nlohmann::json& sd_vae_config() {
  static const nlohmann::json kConfig = {{"block_out_channels", {128, 256, 512, 512}},
                                         {"layers_per_block", 2}};
  return kConfig;
}

AutoencoderKlConfig parse_autoencoder_kl_config(const nlohmann::json& config) {
  const JsonConfig reader(kWho, config);
  // diffusers' defaults for keys that a file leaves out.
  AutoencoderKlConfig c{.block_out_channels = {64}, .layers_per_block = 1};
  KILN_GET_FIELDS(reader, c, in_channels, out_channels, block_out_channels, layers_per_block, latent_channels,
                  norm_num_groups, scaling_factor, shift_factor, use_quant_conv, use_post_quant_conv,
                  mid_block_add_attention);
  if (c.in_channels <= 0 || c.out_channels <= 0 || c.layers_per_block <= 0 || c.latent_channels <= 0 ||
      c.norm_num_groups <= 0 || c.block_out_channels.empty())
    fail(kWho,
         "in_channels, out_channels, layers_per_block, latent_channels, norm_num_groups and the number of "
         "block_out_channels must be > 0");
  for (const int64_t width : c.block_out_channels)
    if (width <= 0 || width % c.norm_num_groups != 0)
      fail(kWho, "block_out_channels must be multiples of norm_num_groups {}, got {}", c.norm_num_groups,
           width);
  const std::string activation = reader.get<std::string>("act_fn", "silu");
  if (activation != "silu" && activation != "swish")
    fail(kWho, "config key act_fn is {}; only silu is built", activation);
  check_block_types(reader, "down_block_types", "DownEncoderBlock2D", c.block_out_channels.size());
  check_block_types(reader, "up_block_types", "UpDecoderBlock2D", c.block_out_channels.size());
  for (const char* key : {"latents_mean", "latents_std"})
    if (reader.has(key))
      fail(kWho, "config key {} is set; only scaling_factor and shift_factor are built", key);
  if (!(c.scaling_factor > 0) || !std::isfinite(c.shift_factor))
    fail(kWho, "expected scaling_factor > 0 and a finite shift_factor, got {} and {}", c.scaling_factor,
         c.shift_factor);
  return c;
}

}  // namespace kiln
