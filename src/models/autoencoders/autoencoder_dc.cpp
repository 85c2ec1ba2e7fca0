#include "models/autoencoders/autoencoder_dc.h"

#include <fmt/ranges.h>

#include <cmath>
#include <optional>
#include <variant>

#include "core/aten.h"
#include "core/error.h"
#include "models/parts/layers.h"
#include "models/weights.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace kiln {
namespace {

constexpr double kNormEps = 1e-5;
constexpr int64_t kGluExpansion = 4;
constexpr const char* kBatchCount = ".num_batches_tracked";

at::Tensor dc_features(const at::Tensor& x, at::ScalarType dtype) {
  return x.to(dtype).contiguous(at::MemoryFormat::ChannelsLast);
}

// (B, C, H, W) channels-last and (B, H, W, C) are the same memory.
at::Tensor to_rows(const at::Tensor& x) { return x.permute({0, 2, 3, 1}); }
at::Tensor to_features(const at::Tensor& rows) { return rows.permute({0, 3, 1, 2}); }

Conv2d conv_without_bias(const ParameterScope& scope, const std::string& name, int64_t in, int64_t out,
                         int64_t kernel) {
  const Init init = Init::uniform(1 / std::sqrt(static_cast<double>(in * kernel * kernel)));
  return {.weight = scope.add(name + ".weight", {out, in, kernel, kernel}, init),
          .bias = nullptr,
          .shape = {.padding = kernel / 2}};
}

// RMS norm over the channels with a bias, or batch norm with its running statistics. Computes in f32.
struct DcNorm {
  std::shared_ptr<Parameter> weight, bias, mean, variance;

  DcNorm(const ParameterScope& scope, int64_t channels, bool is_batch_norm)
      : weight(scope.add("weight", {channels}, Init::ones())),
        bias(scope.add("bias", {channels}, Init::zeros())) {
    if (!is_batch_norm) return;
    mean = scope.add("running_mean", {channels}, Init::zeros(), /*trainable=*/false);
    variance = scope.add("running_var", {channels}, Init::ones(), /*trainable=*/false);
  }

  at::Tensor forward(const at::Tensor& x) const {
    const at::Tensor rows = to_rows(x);
    if (!mean) return to_features(ops::rms_norm(rows, weight->value, bias->value, kNormEps));
    const at::Tensor normed = (rows.to(at::kFloat) - mean->value.to(at::kFloat)) *
                              (variance->value.to(at::kFloat) + kNormEps).rsqrt();
    const at::Tensor out = normed * weight->value.to(at::kFloat) + bias->value.to(at::kFloat);
    return to_features(out.to(x.scalar_type()));
  }
};

struct DcResBlock {
  Conv2d conv1, conv2;
  DcNorm norm;
  bool is_relu;  // by at::threshold, since at::relu has no Meta kernel

  DcResBlock(const ParameterScope& scope, int64_t width, bool is_batch_norm, bool relu)
      : conv1(scope.conv2d("conv1", width, width, 3, 1, 1)),
        conv2(conv_without_bias(scope, "conv2", width, width, 3)),
        norm(scope.under("norm"), width, is_batch_norm),
        is_relu(relu) {}

  at::Tensor forward(const at::Tensor& x, at::ScalarType dtype) const {
    const at::Tensor hidden = conv1.forward(x, dtype);
    return norm.forward(conv2.forward(is_relu ? at::threshold(hidden, 0, 0) : ops::silu(hidden), dtype))
        .add_(x);
  }
};

// Linear attention with ReLU features (EfficientViT, Cai et al. 2023) over the projection and its extra
// scales. The projection's channels form a triple (q, k, v) for each head. to_q, to_k and to_v are just its
// thirds: their outputs are not q, k and v.
struct DcAttention {
  int64_t head_dim;
  Linear to_q, to_k, to_v, to_out;
  struct Scale {
    Conv2d depthwise, grouped;
  };
  std::vector<Scale> scales;
  DcNorm norm;

  DcAttention(const ParameterScope& scope, int64_t width, int64_t head_size,
              const std::vector<int64_t>& kernels, bool is_batch_norm)
      : head_dim(head_size),
        to_q(scope.uniform_linear("to_q", width, width, /*has_bias=*/false)),
        to_k(scope.uniform_linear("to_k", width, width, /*has_bias=*/false)),
        to_v(scope.uniform_linear("to_v", width, width, /*has_bias=*/false)),
        to_out(scope.uniform_linear("to_out", width * static_cast<int64_t>(1 + kernels.size()), width,
                                    /*has_bias=*/false)),
        norm(scope.under("norm_out"), width, is_batch_norm) {
    for (size_t i = 0; i < kernels.size(); ++i) {
      const ParameterScope under = scope.under("to_qkv_multiscale." + std::to_string(i));
      scales.push_back({under.grouped_conv2d("proj_in", 3 * width, kernels[i], 3 * width, /*has_bias=*/false),
                        under.grouped_conv2d("proj_out", 3 * width, 1, 3 * width / head_dim,
                                             /*has_bias=*/false)});
    }
  }

  at::Tensor forward(const at::Tensor& x, at::ScalarType dtype) const {
    const at::Tensor projection = to_features(joined_linears({&to_q, &to_k, &to_v}, to_rows(x), dtype));
    std::vector<at::Tensor> all = {projection};
    for (const Scale& scale : scales)
      all.push_back(scale.grouped.forward(scale.depthwise.forward(projection, dtype), dtype));
    const at::Tensor attended = attend(to_rows(at::cat(all, 1)));
    return norm.forward(to_features(to_out.forward(attended, dtype))).add_(x);
  }

 private:
  // qkv (B, H, W, heads * 3 * d) -> (B, H, W, heads * d).
  at::Tensor attend(const at::Tensor& qkv) const {
    const at::Tensor heads = qkv.flatten(1, 2).unflatten(2, {-1, 3, head_dim});  // (B, N, heads, 3, d)
    return ops::relu_linear_attention(heads.select(3, 0), heads.select(3, 1), heads.select(3, 2))
        .unflatten(1, {qkv.size(1), qkv.size(2)});
  }
};

// An inverted bottleneck with a gate: 1x1, depthwise 3x3, x * SiLU(gate), 1x1.
struct DcGluConv {
  Conv2d inverted, depth, point;
  DcNorm norm;

  DcGluConv(const ParameterScope& scope, int64_t width)
      : inverted(scope.conv2d("conv_inverted", width, 2 * kGluExpansion * width, 1)),
        depth(scope.grouped_conv2d("conv_depth", 2 * kGluExpansion * width, 3, 2 * kGluExpansion * width,
                                   /*has_bias=*/true)),
        point(conv_without_bias(scope, "conv_point", kGluExpansion * width, width, 1)),
        norm(scope.under("norm"), width, /*is_batch_norm=*/false) {}

  at::Tensor forward(const at::Tensor& x, at::ScalarType dtype) const {
    const at::Tensor hidden = depth.forward(ops::silu(inverted.forward(x, dtype)), dtype);
    const auto halves = hidden.chunk(2, 1);
    return norm.forward(point.forward(halves[0] * at::silu(halves[1]), dtype)).add_(x);
  }
};

struct DcTransformerBlock {
  DcAttention attention;
  DcGluConv feed_forward;

  at::Tensor forward(const at::Tensor& x, at::ScalarType dtype) const {
    return feed_forward.forward(attention.forward(x, dtype), dtype);
  }
};

// Halves the size by a strided convolution, or by a convolution and pixel unshuffling.
struct DcDown {
  Conv2d conv;
  int64_t out;
  bool shuffles, shortcut;

  DcDown(const ParameterScope& scope, int64_t in, int64_t out_width, bool shuffle, bool has_shortcut)
      : conv(scope.conv2d("conv", in, shuffle ? out_width / 4 : out_width, 3, shuffle ? 1 : 2, 1)),
        out(out_width),
        shuffles(shuffle),
        shortcut(has_shortcut) {}

  at::Tensor forward(const at::Tensor& x, at::ScalarType dtype) const {
    at::Tensor halved = conv.forward(x, dtype);
    if (shuffles) halved = ops::pixels_to_channels(halved);
    if (shortcut) halved = halved + ops::mean_of_channels(ops::pixels_to_channels(x), out);
    return dc_features(halved, dtype);
  }
};

// Doubles the size by nearest neighbours and a convolution, or by a convolution and pixel shuffling.
struct DcUp {
  Conv2d conv;
  int64_t out;
  bool shuffles, shortcut;

  DcUp(const ParameterScope& scope, int64_t in, int64_t out_width, bool shuffle, bool has_shortcut)
      : conv(scope.conv2d("conv", in, shuffle ? 4 * out_width : out_width, 3, 1, 1)),
        out(out_width),
        shuffles(shuffle),
        shortcut(has_shortcut) {}

  at::Tensor forward(const at::Tensor& x, at::ScalarType dtype) const {
    at::Tensor doubled = shuffles
                             ? ops::channels_to_pixels(conv.forward(x, dtype))
                             : conv.forward(at::upsample_nearest2d(x, {2 * x.size(2), 2 * x.size(3)}), dtype);
    if (shortcut) doubled = doubled + ops::channels_to_pixels(x, 4 * out / x.size(1));
    return dc_features(doubled, dtype);
  }
};

using DcBlock = std::variant<DcResBlock, DcTransformerBlock, DcDown, DcUp>;

at::Tensor forward_all(const std::vector<DcBlock>& blocks, at::Tensor x, at::ScalarType dtype) {
  for (const DcBlock& block : blocks)
    x = std::visit([&](const auto& part) { return part.forward(x, dtype); }, block);
  return x;
}

void add_layers(std::vector<DcBlock>& blocks, const DcHalfConfig& half, size_t level, int64_t head_dim,
                const ParameterScope& scope, int64_t first_index) {
  for (int64_t i = 0; i < half.layers[level]; ++i) {
    const ParameterScope under = scope.under(std::to_string(first_index + i));
    const int64_t width = half.widths[level];
    if (half.is_attention[level])
      blocks.emplace_back(DcTransformerBlock{DcAttention(under.under("attn"), width, head_dim,
                                                         half.multiscales[level], half.is_batch_norm[level]),
                                             DcGluConv(under.under("conv_out"), width)});
    else
      blocks.emplace_back(DcResBlock(under, width, half.is_batch_norm[level], half.is_relu[level]));
  }
}

}  // namespace

struct AutoencoderDc::Encoder {
  at::ScalarType dtype;
  int64_t latent_channels;
  bool shortcut;
  std::optional<Conv2d> conv_in;
  std::vector<DcBlock> blocks;
  Conv2d conv_out;

  Encoder(const AutoencoderDcConfig& config, const ParameterScope& scope, at::ScalarType compute_dtype)
      : dtype(compute_dtype), latent_channels(config.latent_channels), shortcut(config.encoder.shortcut) {
    const DcHalfConfig& half = config.encoder;
    if (half.layers[0] > 0)
      conv_in = scope.conv2d("conv_in", config.in_channels, half.outer_width(), 3, 1, 1);
    else
      blocks.emplace_back(DcDown(scope.under("conv_in"), config.in_channels, half.outer_width(),
                                 half.shuffles, /*has_shortcut=*/false));
    for (size_t level = 0; level < half.widths.size(); ++level) {
      if (half.layers[level] == 0) continue;
      const ParameterScope under = scope.under("down_blocks." + std::to_string(level));
      add_layers(blocks, half, level, config.head_dim, under, 0);
      if (level + 1 < half.widths.size())
        blocks.emplace_back(DcDown(under.under(std::to_string(half.layers[level])), half.widths[level],
                                   half.widths[level + 1], half.shuffles, /*has_shortcut=*/true));
    }
    conv_out = scope.conv2d("conv_out", half.widths.back(), config.latent_channels, 3, 1, 1);
  }

  at::Tensor forward(const at::Tensor& images) const {
    at::Tensor x = dc_features(images, dtype);
    if (conv_in) x = conv_in->forward(x, dtype);
    x = forward_all(blocks, x, dtype);
    const at::Tensor out = conv_out.forward(x, dtype);
    return shortcut ? out + ops::mean_of_channels(x, latent_channels) : out;
  }
};

struct AutoencoderDc::Decoder {
  at::ScalarType dtype;
  bool shortcut, final_relu;
  Conv2d conv_in;
  std::vector<DcBlock> blocks;
  std::optional<DcNorm> norm_out;
  std::optional<Conv2d> conv_out;
  std::vector<DcBlock> up_out;  // replaces conv_out where that is absent

  Decoder(const AutoencoderDcConfig& config, const ParameterScope& scope, at::ScalarType compute_dtype)
      : dtype(compute_dtype), shortcut(config.decoder.shortcut), final_relu(config.final_relu) {
    const DcHalfConfig& half = config.decoder;
    conv_in = scope.conv2d("conv_in", config.latent_channels, half.widths.back(), 3, 1, 1);
    for (size_t level = half.widths.size(); level-- > 0;) {
      if (half.layers[level] == 0) continue;
      const ParameterScope under = scope.under("up_blocks." + std::to_string(level));
      const bool enlarges = level + 1 < half.widths.size();
      if (enlarges)
        blocks.emplace_back(DcUp(under.under("0"), half.widths[level + 1], half.widths[level], half.shuffles,
                                 /*has_shortcut=*/true));
      add_layers(blocks, half, level, config.head_dim, under, enlarges ? 1 : 0);
    }
    norm_out.emplace(scope.under("norm_out"), half.outer_width(), /*is_batch_norm=*/false);
    if (half.layers[0] > 0)
      conv_out = scope.conv2d("conv_out", half.outer_width(), config.in_channels, 3, 1, 1);
    else
      up_out.emplace_back(DcUp(scope.under("conv_out"), half.outer_width(), config.in_channels, half.shuffles,
                               /*has_shortcut=*/false));
  }

  at::Tensor forward(const at::Tensor& raw_latents) const {
    const at::Tensor latents = dc_features(raw_latents, dtype);
    at::Tensor x = conv_in.forward(latents, dtype);
    if (shortcut) x = x + at::repeat_interleave(latents, x.size(1) / latents.size(1), 1);
    x = norm_out->forward(forward_all(blocks, dc_features(x, dtype), dtype));
    x = final_relu ? at::threshold(x, 0, 0) : ops::silu(x);
    return conv_out ? conv_out->forward(x, dtype) : forward_all(up_out, x, dtype);
  }
};

AutoencoderDc::AutoencoderDc(const AutoencoderDcConfig& config, const BuildOptions& options)
    : in_channels_(config.in_channels),
      compute_dtype_(ops::product_dtype(options.device, options.compute_dtype)) {
  name = "autoencoder_dc";
  tile_overlap = 0.125;
  has_posterior = false;
  latent_channels = config.latent_channels;
  downsample = int64_t{1} << (config.encoder.widths.size() - 1);
  scaling_factor = config.scaling_factor;
  const ParameterScope root(parameters_, options);
  encoder_ = std::make_unique<const Encoder>(config, root.under("encoder"), compute_dtype_);
  decoder_ = std::make_unique<const Decoder>(config, root.under("decoder"), compute_dtype_);
}

AutoencoderDc::~AutoencoderDc() = default;

at::Tensor AutoencoderDc::encode(const at::Tensor& images) const {
  if (images.dim() != 4 || images.size(1) != in_channels_ || images.size(2) < downsample ||
      images.size(2) % downsample != 0 || images.size(3) < downsample || images.size(3) % downsample != 0)
    fail("autoencoder_dc", "expected images (B, {}, H, W) with sides that are multiples of {}, got ({})",
         in_channels_, downsample, fmt::join(images.sizes(), ", "));
  return encoder_->forward(images).to(at::kFloat).contiguous();
}

at::Tensor AutoencoderDc::decode(const at::Tensor& raw_latents) const {
  if (raw_latents.dim() != 4 || raw_latents.size(1) != latent_channels)
    fail("autoencoder_dc", "expected latents (B, {}, h, w), got ({})", latent_channels,
         fmt::join(raw_latents.sizes(), ", "));
  return decoder_->forward(raw_latents).to(at::kFloat).contiguous();
}

void AutoencoderDc::freeze_weights() { freeze_convolution_weights(parameters_, compute_dtype_); }

std::map<std::string, at::Tensor> autoencoder_dc_weights(const std::map<std::string, at::Tensor>& weights) {
  std::map<std::string, at::Tensor> kept;
  for (const auto& [key, weight] : weights)
    if (!key.ends_with(kBatchCount)) kept[key] = weight;
  return kept;
}

}  // namespace kiln
