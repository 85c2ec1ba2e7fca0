#include "models/denoisers/sana/sana.h"

#include <fmt/ranges.h>

#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "models/parts/adaln_single.h"
#include "models/parts/embeddings.h"
#include "models/parts/layers.h"
#include "ops/caption_attention.h"
#include "ops/mixed_sum.h"
#include "ops/ops.h"

namespace kiln {
namespace {

constexpr double kRmsNormEps = 1e-5;
constexpr int64_t kMaxTextTokens = 300;  // rows of Gemma's captions
constexpr double kFreshCaptionNorm =
    0.01;  // small at first: large captions made training unstable (sec. 2.3)

ScalarEmbedder scalar_embedder(const ParameterScope& scope, const std::string& name, int64_t width) {
  return {embedding_linear(scope, name + ".linear_1", kScalarFrequencies, width),
          embedding_linear(scope, name + ".linear_2", width, width)};
}

// Makes a part of a projection that the native code keeps in one matrix of `fused_out` rows. The
// initialisation uses the fan-out of that matrix.
Linear part_linear(const ParameterScope& scope, const std::string& name, int64_t in, int64_t out,
                   int64_t fused_out, bool bias) {
  const Init init = Init::xavier_uniform(in, fused_out);
  if (bias) return scope.linear(name, in, out, init);
  return {.weight = scope.add_adaptable(name + ".weight", {out, in}, init), .bias = nullptr};
}

RmsNorm rms_norm(const ParameterScope& scope, const std::string& name, int64_t width) {
  return {.weight = scope.add(name + ".weight", {width}, Init::ones()), .eps = kRmsNormEps};
}

// x_t, t, captions -> tokens, modulation (B, 7 D) and projected captions (T, D), all f32.
class SanaEmbed : public Segment {
 public:
  SanaEmbed(const SanaConfig& config, const ConditioningShape& shape, const BuildOptions& options)
      : config_(config), shape_(shape), compute_dtype_(options.compute_dtype) {
    name_ = "embed";
    const ParameterScope scope(parameters_, options);
    const int64_t width = config.width(), p = config.patch_size, patch = config.in_channels * p * p;
    patches_ = {.weight = scope.add_adaptable("patch_embed.proj.weight", {width, config.in_channels, p, p},
                                              Init::xavier_uniform(patch, width)),
                .bias = scope.add("patch_embed.proj.bias", {width},
                                  Init::uniform(1 / std::sqrt(static_cast<double>(patch))))};
    if (config.guidance_embeds) {
      timestep_ = scalar_embedder(scope, "time_embed.timestep_embedder", width);
      guidance_ = scalar_embedder(scope, "time_embed.guidance_embedder", width);
      guidance_.second.weight->init = Init::zeros();
    } else {
      timestep_ = scalar_embedder(scope, "time_embed.emb.timestep_embedder", width);
    }
    modulation_ = embedding_linear(scope, "time_embed.linear", width, kModulationVectors * width);
    captions_ = {embedding_linear(scope, "caption_projection.linear_1", config.caption_channels, width),
                 embedding_linear(scope, "caption_projection.linear_2", width, width)};
    caption_norm_ = rms_norm(scope, "caption_norm", width);
    caption_norm_.weight->init = Init::constant(at::full({width}, kFreshCaptionNorm, at::kFloat));
  }

  State forward(const State&, const ModelInput& input) const override {
    check(input);
    const PatchGrid grid = patch_grid(input, config_.patch_size);
    const at::Tensor patches =
        patches_.forward_rows(nn::patchify(input.x_t, config_.patch_size), compute_dtype_);
    at::Tensor embedding = timestep_.forward(input.timesteps, compute_dtype_);
    if (config_.guidance_embeds)
      embedding = embedding + guidance_.forward(input.conditioning.guidance, compute_dtype_);
    return {.hidden = positioned(patches, grid),
            .conditioning = pack_modulation(embedding, modulation_, compute_dtype_),
            .text = caption_norm_.forward(captions_.forward(input.conditioning.text.rows, compute_dtype_),
                                          at::kFloat)};
  }

 private:
  at::Tensor positioned(const at::Tensor& patches, const PatchGrid& grid) const {
    if (!config_.interpolation_scale) return patches.to(at::kFloat);
    return ops::mixed_sum(patches,
                          nn::scaled_position_table(config_.width(), grid.height, grid.width, config_.grid(),
                                                    *config_.interpolation_scale, patches.device()));
  }

  void check(const ModelInput& input) const {
    const at::Tensor& x = input.x_t;
    if (x.dim() != 4 || x.size(1) != config_.in_channels || x.size(2) < 1 || x.size(3) < 1 ||
        x.size(2) % config_.patch_size != 0 || x.size(3) % config_.patch_size != 0)
      fail("sana", "expected x_t of shape (B, {}, H, W) with sides divisible by {}, got ({})",
           config_.in_channels, config_.patch_size, fmt::join(x.sizes(), ", "));
    check_conditioning(shape_, input.conditioning, x.size(0));
  }

  SanaConfig config_;
  ConditioningShape shape_;
  at::ScalarType compute_dtype_;
  Conv2d patches_;
  ScalarEmbedder timestep_, guidance_;
  Linear modulation_;
  CaptionMlp captions_;
  RmsNorm caption_norm_;
};

class SanaBlock : public Segment {
 public:
  SanaBlock(const SanaConfig& config, int64_t index, const BuildOptions& options)
      : config_(config), compute_dtype_(options.compute_dtype) {
    name_ = "blocks." + std::to_string(index);
    const ParameterScope scope =
        ParameterScope(parameters_, options).under("transformer_blocks." + std::to_string(index));
    const int64_t width = config.width(), cross = config.cross_width();
    table_ = modulation_table(scope, "scale_shift_table", kModulationVectors, width);
    q_ = part_linear(scope, "attn1.to_q", width, width, 3 * width, config.attention_bias);
    k_ = part_linear(scope, "attn1.to_k", width, width, 3 * width, config.attention_bias);
    v_ = part_linear(scope, "attn1.to_v", width, width, 3 * width, config.attention_bias);
    out_ = scope.xavier_linear("attn1.to_out.0", width, width);
    cross_q_ = scope.xavier_linear("attn2.to_q", width, cross);
    cross_k_ = part_linear(scope, "attn2.to_k", width, cross, 2 * cross, true);
    cross_v_ = part_linear(scope, "attn2.to_v", width, cross, 2 * cross, true);
    cross_out_ = scope.xavier_linear("attn2.to_out.0", cross, width);
    if (config.qk_norm) {
      q_norm_ = rms_norm(scope, "attn1.norm_q", width);
      k_norm_ = rms_norm(scope, "attn1.norm_k", width);
      cross_q_norm_ = rms_norm(scope, "attn2.norm_q", cross);
      cross_k_norm_ = rms_norm(scope, "attn2.norm_k", cross);
    }
    inverted_ = scope.conv2d("ff.conv_inverted", width, 2 * config.mlp_size(), 1);
    const Init depth_init = Init::uniform(1.0 / 3);  // of a fan-in of 9
    depth_weight_ = scope.add("ff.conv_depth.weight", {2 * config.mlp_size(), 1, 3, 3}, depth_init);
    depth_bias_ = scope.add("ff.conv_depth.bias", {2 * config.mlp_size()}, depth_init);
    point_ = scope.pointwise_conv2d("ff.conv_point", config.mlp_size(), width,
                                    Init::uniform(1 / std::sqrt(static_cast<double>(config.mlp_size()))),
                                    /*has_bias=*/false);
  }

  State forward(const State& state, const ModelInput& input) const override {
    const auto vectors = block_modulation(table_->value, state.conditioning);
    const at::Tensor &shift_msa = vectors[0], &scale_msa = vectors[1], &gate_msa = vectors[2];
    const at::Tensor &shift_mlp = vectors[3], &scale_mlp = vectors[4], &gate_mlp = vectors[5];
    at::Tensor x = state.hidden;  // (B, N, D), the residual stream
    x = ops::gated_residual(
        x, gate_msa,
        linear_attention(ops::adaln_modulate(x, shift_msa, scale_msa, config_.norm_eps, compute_dtype_)));
    x = ops::mixed_sum(x, cross_attention(x, state.text, input.conditioning.text));
    x = ops::gated_residual(
        x, gate_mlp,
        glu_mbconv(ops::adaln_modulate(x, shift_mlp, scale_mlp, config_.norm_eps, compute_dtype_),
                   patch_grid(input, config_.patch_size)));
    return {.hidden = x, .conditioning = state.conditioning, .text = state.text};
  }

 private:
  at::Tensor normed(const RmsNorm& norm, const at::Tensor& x) const {
    return config_.qk_norm ? norm.forward(x, compute_dtype_) : x;
  }

  at::Tensor linear_attention(const at::Tensor& x) const {
    const std::vector<int64_t> heads = {x.size(0), x.size(1), config_.num_attention_heads,
                                        config_.attention_head_dim};
    const at::Tensor q = normed(q_norm_, q_.forward(x, compute_dtype_)),
                     k = normed(k_norm_, k_.forward(x, compute_dtype_)), v = v_.forward(x, compute_dtype_);
    return out_.forward(ops::relu_linear_attention(q.view(heads), k.view(heads), v.view(heads)),
                        compute_dtype_);
  }

  at::Tensor cross_attention(const at::Tensor& x, const at::Tensor& text, const TextRows& captions) const {
    const int64_t num_heads = config_.num_cross_attention_heads, head_dim = config_.cross_attention_head_dim;
    const at::Tensor q = normed(cross_q_norm_, cross_q_.forward(x, compute_dtype_)),
                     k = normed(cross_k_norm_, cross_k_.forward(text, compute_dtype_)),
                     v = cross_v_.forward(text, compute_dtype_);
    const at::Tensor attended = ops::caption_attention(
        q.view({x.size(0), x.size(1), num_heads, head_dim}), k.view({-1, num_heads, head_dim}),
        v.view({-1, num_heads, head_dim}), captions.host_offsets, captions.offsets,
        1 / std::sqrt(static_cast<double>(head_dim)));
    return cross_out_.forward(attended, compute_dtype_);
  }

  // x (B, N, D): pixels in rows, channels last.
  at::Tensor glu_mbconv(const at::Tensor& x, const PatchGrid& grid) const {
    const at::Tensor wide = inverted_.forward_rows(x, compute_dtype_);
    const at::Tensor gated =
        ops::glu_depthwise_conv(wide, depth_weight_->value, depth_bias_->value, grid.height, grid.width);
    return point_.forward_rows(gated, compute_dtype_);
  }

  SanaConfig config_;
  at::ScalarType compute_dtype_;
  std::shared_ptr<Parameter> table_, depth_weight_, depth_bias_;
  Linear q_, k_, v_, out_, cross_q_, cross_k_, cross_v_, cross_out_;
  RmsNorm q_norm_, k_norm_, cross_q_norm_, cross_k_norm_;
  Conv2d inverted_, point_;
};

class SanaFinal : public ModulatedFinal {
 public:
  SanaFinal(const SanaConfig& config, const BuildOptions& options)
      : ModulatedFinal(config.patch_size, options) {
    const ParameterScope scope(parameters_, options);
    table_ = modulation_table(scope, "scale_shift_table", 2, config.width());
    linear_ = scope.xavier_linear("proj_out", config.width(),
                                  config.patch_size * config.patch_size * config.out_channels);
  }
};

class Sana : public Denoiser {
 public:
  Sana(const SanaConfig& config, const BuildOptions& options) {
    const ConditioningShape conditioning = {.text_width = config.caption_channels,
                                            .max_text_tokens = kMaxTextTokens,
                                            .takes_guidance = config.guidance_embeds};
    segments_.push_back(std::make_unique<SanaEmbed>(config, conditioning, options));
    for (int64_t i = 0; i < config.num_layers; ++i)
      segments_.push_back(std::make_unique<SanaBlock>(config, i, options));
    segments_.push_back(std::make_unique<SanaFinal>(config, options));
    shape_ = {.in_channels = config.in_channels,
              .out_channels = config.out_channels,
              .input_size = config.sample_size,
              .size_multiple = config.patch_size,
              .conditioning = conditioning,
              .guided_channels = config.in_channels,
              .tokens = {.width = config.width(), .patch_size = config.patch_size}};
  }
};

}  // namespace

std::unique_ptr<Denoiser> build_sana(const SanaConfig& config, const BuildOptions& options) {
  return std::make_unique<Sana>(config, options);
}

}  // namespace kiln
