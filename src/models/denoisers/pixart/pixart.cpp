#include "models/denoisers/pixart/pixart.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "models/denoisers/pixart/pixart_keys.h"
#include "models/parts/adaln_single.h"
#include "models/parts/embeddings.h"
#include "models/parts/layers.h"
#include "ops/caption_attention.h"
#include "ops/mixed_sum.h"
#include "ops/ops.h"

namespace kiln {
namespace {

constexpr double kQkNormEps = 1e-5;  // PyTorch's default, for norms with weights

const PixartKeys& keys_of(const PixartConfig& config) {
  return config.keys == PixartConfig::Keys::kRepository ? kPixartRepositoryKeys : kPixartDiffusersKeys;
}

// A projection to several parts, as one weight or as a weight for each part.
class PartProjection {
 public:
  PartProjection() = default;
  template <size_t kParts>
  PartProjection(const ParameterScope& scope, const PixartConfig& config, const char* fused,
                 const char* const (&parts)[kParts], int64_t in)
      : num_parts_(kParts), num_heads_(config.num_heads) {
    const int64_t width = config.hidden_size, rows = static_cast<int64_t>(kParts) * width;
    if (config.keys == PixartConfig::Keys::kRepository)
      linears_.push_back(scope.xavier_linear(fused, in, rows));
    else
      for (const char* part : parts)
        linears_.push_back(scope.linear(part, in, width, Init::xavier_uniform(in, rows)));
  }

  // (..., in) -> (..., parts, H, d) in the compute dtype.
  at::Tensor forward(const at::Tensor& x, at::ScalarType compute_dtype) const {
    std::vector<at::Tensor> parts;
    for (const Linear& linear : linears_) parts.push_back(linear.forward(x, compute_dtype));
    const at::Tensor all = parts.size() == 1 ? parts[0] : at::stack(parts, -2);
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = num_parts_;
    shape.push_back(num_heads_);
    shape.push_back(linears_[0].weight->value.size(0) * static_cast<int64_t>(linears_.size()) /
                    (num_parts_ * num_heads_));
    return all.view(shape);
  }

 private:
  int64_t num_parts_ = 1, num_heads_ = 1;
  std::vector<Linear> linears_;
};

// Thins out keys and values on the grid of patches.
class KvCompression {
 public:
  KvCompression() = default;
  KvCompression(const ParameterScope& scope, const PixartConfig& config)
      : sampling_(config.kv_sampling), factor_(config.kv_factor) {
    if (sampling_ != PixartConfig::KvSampling::kConvolution) return;
    const int64_t width = config.hidden_size;
    const double mean = 1 / static_cast<double>(factor_ * factor_);
    weight_ = scope.add("attn.sr.weight", {width, 1, factor_, factor_},
                        Init::constant(at::full({width, 1, factor_, factor_}, mean, at::kFloat)));
    bias_ = scope.add("attn.sr.bias", {width}, Init::zeros());
    norm_ = {.weight = scope.add("attn.norm.weight", {width}, Init::ones()),
             .bias = scope.add("attn.norm.bias", {width}, Init::zeros()),
             .eps = kQkNormEps};
  }

  bool is_on() const { return sampling_ != PixartConfig::KvSampling::kNone; }

  // x (B, N, D) -> (B, M, D), contiguous.
  at::Tensor forward(const at::Tensor& x, const PatchGrid& grid) const {
    using Sampling = PixartConfig::KvSampling;
    if (sampling_ == Sampling::kEvery) return x.slice(1, 0, std::nullopt, factor_).contiguous();
    const int64_t rows = grid.height / factor_, columns = grid.width / factor_;
    if (rows < 1 || columns < 1)
      fail("pixart", "a grid of {} x {} patches is too small to compress keys and values by {}", grid.height,
           grid.width, factor_);
    const at::Tensor pixels = x.view({x.size(0), grid.height, grid.width, x.size(2)});
    if (sampling_ != Sampling::kConvolution)  // same as nearest interpolation by a whole factor
      return pixels.slice(1, 0, rows * factor_, factor_)
          .slice(2, 0, columns * factor_, factor_)
          .reshape({x.size(0), rows * columns, x.size(2)});
    const at::Tensor patches = pixels.narrow(1, 0, rows * factor_)
                                   .narrow(2, 0, columns * factor_)
                                   .reshape({x.size(0), rows, factor_, columns, factor_, x.size(2)});
    const at::Tensor kernel = weight_->value.to(at::kFloat).permute({2, 1, 3, 0});  // (f, 1, f, D)
    const at::Tensor sums = (patches.to(at::kFloat) * kernel).sum(at::IntArrayRef({2, 4}));
    const at::Tensor convolved = (sums + bias_->value.to(at::kFloat)).flatten(1, 2);
    return norm_.forward(convolved, x.scalar_type());
  }

 private:
  PixartConfig::KvSampling sampling_ = PixartConfig::KvSampling::kNone;
  int64_t factor_ = 1;
  std::shared_ptr<Parameter> weight_, bias_;
  LayerNorm norm_;
};

// x_t, t, captions -> tokens, modulation (B, 7 D) and projected captions (T, D), all f32.
class PixartEmbed : public Segment {
 public:
  PixartEmbed(const PixartConfig& config, const ConditioningShape& shape, const BuildOptions& options)
      : config_(config), shape_(shape), compute_dtype_(options.compute_dtype) {
    name_ = "embed";
    const ParameterScope scope(parameters_, options);
    const PixartKeys& keys = keys_of(config);
    const int64_t width = config.hidden_size, p = config.patch_size, patch = config.in_channels * p * p;
    const bool in_repository = config.keys == PixartConfig::Keys::kRepository;
    if (in_repository)
      pos_embed_ = scope.add("pos_embed", {1, config.num_tokens(), width},
                             Init::constant(positions(config.grid(), config.grid(), at::kCPU)),
                             /*trainable=*/false);
    const ParameterScope patch_scope = scope.under(keys.patch);
    patches_ = {
        .weight = patch_scope.add_adaptable("weight", {width, config.in_channels, p, p},
                                            Init::xavier_uniform(patch, width)),
        .bias = patch_scope.add("bias", {width}, Init::uniform(1 / std::sqrt(static_cast<double>(patch))))};
    timestep_ = {embedding_linear(scope, keys.timestep_1, kScalarFrequencies, width),
                 embedding_linear(scope, keys.timestep_2, width, width)};
    if (config.micro_condition) {
      size_ = {embedding_linear(scope, keys.size_1, kScalarFrequencies, width / 3),
               embedding_linear(scope, keys.size_2, width / 3, width / 3)};
      aspect_ = {embedding_linear(scope, keys.aspect_1, kScalarFrequencies, width / 3),
                 embedding_linear(scope, keys.aspect_2, width / 3, width / 3)};
    }
    modulation_ = embedding_linear(scope, keys.modulation, width, kModulationVectors * width);
    if (in_repository)
      null_caption_ = scope.add("y_embedder.y_embedding", {config.model_max_length, config.caption_channels},
                                Init::normal(1 / std::sqrt(static_cast<double>(config.caption_channels))),
                                /*trainable=*/false);
    if (config.projects_captions)
      captions_ = {embedding_linear(scope, keys.caption_1, config.caption_channels, width),
                   embedding_linear(scope, keys.caption_2, width, width)};
  }

  const std::shared_ptr<Parameter>& null_caption() const { return null_caption_; }

  State forward(const State&, const ModelInput& input) const override {
    check(input);
    const PatchGrid grid = patch_grid(input, config_.patch_size);
    const at::Tensor patches =
        patches_.forward_rows(nn::patchify(input.x_t, config_.patch_size), compute_dtype_);
    const at::Tensor table = config_.multi_scale ? positions(grid.height, grid.width, patches.device())
                                                 : pos_embed_->value.to(at::kFloat);
    return {.hidden = ops::mixed_sum(patches, table),
            .conditioning = pack_modulation(embedding(input), modulation_, compute_dtype_),
            .text = text(input.conditioning.text)};
  }

 private:
  at::Tensor positions(int64_t height, int64_t width, at::Device device) const {
    return nn::scaled_position_table(config_.hidden_size, height, width, config_.grid(),
                                     config_.pe_interpolation, device);
  }

  void check(const ModelInput& input) const {
    const at::Tensor& x = input.x_t;
    const bool fits =
        x.dim() == 4 && x.size(1) == config_.in_channels &&
        (config_.multi_scale ? x.size(2) > 0 && x.size(3) > 0 && x.size(2) % config_.patch_size == 0 &&
                                   x.size(3) % config_.patch_size == 0
                             : x.size(2) == config_.input_size && x.size(3) == config_.input_size);
    if (!fits && config_.multi_scale)
      fail("pixart", "expected x_t of shape (B, {}, H, W) with sides divisible by {}, got ({})",
           config_.in_channels, config_.patch_size, fmt::join(x.sizes(), ", "));
    if (!fits)
      fail("pixart", "expected x_t of shape (B, {0}, {1}, {1}), got ({2})", config_.in_channels,
           config_.input_size, fmt::join(x.sizes(), ", "));
    check_conditioning(shape_, input.conditioning, x.size(0));
  }

  // (B, D) f32
  at::Tensor embedding(const ModelInput& input) const {
    at::Tensor timestep = timestep_.forward(input.timesteps, compute_dtype_);
    if (!config_.micro_condition) return timestep;
    const int64_t batch = timestep.size(0);
    const auto embed = [&](const ScalarEmbedder& embedder, const at::Tensor& scalars) {
      return embedder.forward(scalars.to(at::kFloat).flatten(), compute_dtype_).view({batch, -1});
    };
    return timestep + at::cat({embed(size_, input.conditioning.image_hw),
                               embed(aspect_, input.conditioning.aspect_ratio)},
                              1);
  }

  // (T, D); f32 because every block adds to its gradient.
  at::Tensor text(const TextRows& captions) const {
    const at::Tensor rows = null_caption_ ? rows_with_nulls(captions, null_caption_->value) : captions.rows;
    return (config_.projects_captions ? captions_.forward(rows, compute_dtype_) : rows).to(at::kFloat);
  }

  PixartConfig config_;
  ConditioningShape shape_;
  at::ScalarType compute_dtype_;
  std::shared_ptr<Parameter> pos_embed_, null_caption_;
  Conv2d patches_;
  ScalarEmbedder timestep_, size_, aspect_;
  Linear modulation_;
  CaptionMlp captions_;
};

double scale_of_scores(const PixartConfig& config) {
  const int64_t head_dim = config.hidden_size / config.num_heads;
  return 1 / std::sqrt(static_cast<double>(head_dim));
}

class PixartBlock : public Segment {
 public:
  PixartBlock(const PixartConfig& config, int64_t index, const BuildOptions& options)
      : compute_dtype_(options.compute_dtype),
        patch_size_(config.patch_size),
        norm_eps_(config.norm_eps),
        qk_norm_(config.qk_norm),
        scale_(scale_of_scores(config)) {
    name_ = "blocks." + std::to_string(index);
    const PixartKeys& keys = keys_of(config);
    const ParameterScope scope =
        ParameterScope(parameters_, options).under(fmt::format("{}.{}", keys.blocks, index));
    const int64_t width = config.hidden_size;
    table_ = modulation_table(scope, "scale_shift_table", kModulationVectors, width);
    qkv_ = PartProjection(scope, config, kPixartQkv, kPixartQkvParts, width);
    if (qk_norm_) {
      q_norm_ = layer_norm(scope, "attn.q_norm", width);
      k_norm_ = layer_norm(scope, "attn.k_norm", width);
    }
    if (config.thins(index)) compression_ = KvCompression(scope, config);
    self_out_ = scope.xavier_linear(keys.self_out, width, width);
    cross_q_ = scope.xavier_linear(keys.cross_q, width, width);
    cross_kv_ = PartProjection(scope, config, kPixartKv, kPixartKvParts, width);
    cross_out_ = scope.linear(keys.cross_out, width, width, Init::zeros());
    fc1_ = scope.xavier_linear(keys.mlp_1, width, config.mlp_size());
    fc2_ = scope.xavier_linear(keys.mlp_2, config.mlp_size(), width);
  }

  State forward(const State& state, const ModelInput& input) const override {
    const auto vectors = block_modulation(table_->value, state.conditioning);
    const at::Tensor &shift_msa = vectors[0], &scale_msa = vectors[1], &gate_msa = vectors[2];
    const at::Tensor &shift_mlp = vectors[3], &scale_mlp = vectors[4], &gate_mlp = vectors[5];
    at::Tensor x = state.hidden;  // (B, N, D), the residual stream
    x = ops::gated_residual(
        x, gate_msa,
        self_attention(ops::adaln_modulate(x, shift_msa, scale_msa, norm_eps_, compute_dtype_),
                       patch_grid(input, patch_size_)));
    x = ops::mixed_sum(x, cross_attention(x, state.text, input.conditioning.text));
    x = ops::gated_residual(x, gate_mlp,
                            mlp(ops::adaln_modulate(x, shift_mlp, scale_mlp, norm_eps_, compute_dtype_)));
    return {.hidden = x, .conditioning = state.conditioning, .text = state.text};
  }

 private:
  static LayerNorm layer_norm(const ParameterScope& scope, const std::string& name, int64_t width) {
    return {.weight = scope.add(name + ".weight", {width}, Init::ones()),
            .bias = scope.add(name + ".bias", {width}, Init::zeros()),
            .eps = kQkNormEps};
  }

  at::Tensor self_attention(const at::Tensor& x, const PatchGrid& grid) const {
    const at::Tensor qkv = qkv_.forward(x, compute_dtype_);  // (B, N, 3, H, d)
    const at::Tensor attended =
        qk_norm_ || compression_.is_on() ? normed_attention(qkv, grid) : ops::packed_attention(qkv, scale_);
    return self_out_.forward(attended, compute_dtype_);
  }

  // Applies norms over the whole width, then thins out keys and values.
  at::Tensor normed_attention(const at::Tensor& qkv, const PatchGrid& grid) const {
    at::Tensor q = qkv.select(2, 0), k = qkv.select(2, 1), v = qkv.select(2, 2);  // (B, N, H, d)
    if (qk_norm_) {
      q = q_norm_.forward(q.flatten(2), compute_dtype_).view(q.sizes());
      k = k_norm_.forward(k.flatten(2), compute_dtype_).view(k.sizes());
    }
    if (!compression_.is_on()) return ops::packed_attention(at::stack({q, k, v}, 2), scale_);
    const int64_t num_heads = q.size(2), head_dim = q.size(3);
    const auto thinned = [&](const at::Tensor& part) { return compression_.forward(part.flatten(2), grid); };
    const at::Tensor keys = thinned(k), values = thinned(v);  // (B, M, D)
    const std::vector<int64_t> heads{q.size(0), keys.size(1), num_heads, head_dim};
    return ops::cross_attention(q, keys.view(heads), values.view(heads), scale_);
  }

  at::Tensor cross_attention(const at::Tensor& x, const at::Tensor& text, const TextRows& captions) const {
    const at::Tensor kv = cross_kv_.forward(text, compute_dtype_);  // (T, 2, H, d)
    const at::Tensor q =
        cross_q_.forward(x, compute_dtype_).view({x.size(0), x.size(1), kv.size(2), kv.size(3)});
    return cross_out_.forward(ops::caption_attention(q, kv.select(1, 0), kv.select(1, 1),
                                                     captions.host_offsets, captions.offsets, scale_),
                              compute_dtype_);
  }

  at::Tensor mlp(const at::Tensor& x) const {
    return fc2_.forward_gelu_tanh(fc1_.forward(x, compute_dtype_), compute_dtype_);
  }

  at::ScalarType compute_dtype_;
  int64_t patch_size_;
  double norm_eps_;
  bool qk_norm_;
  double scale_;
  std::shared_ptr<Parameter> table_;
  PartProjection qkv_, cross_kv_;
  LayerNorm q_norm_, k_norm_;
  KvCompression compression_;
  Linear self_out_, cross_q_, cross_out_, fc1_, fc2_;
};

class PixartFinal : public ModulatedFinal {
 public:
  PixartFinal(const PixartConfig& config, const BuildOptions& options)
      : ModulatedFinal(config.patch_size, options) {
    const ParameterScope scope(parameters_, options);
    const PixartKeys& keys = keys_of(config);
    const int64_t p = config.patch_size;
    linear_ =
        scope.linear(keys.final_linear, config.hidden_size, p * p * config.out_channels(), Init::zeros());
    table_ = modulation_table(scope, keys.final_table, 2, config.hidden_size);
  }
};

class Pixart : public Denoiser {
 public:
  Pixart(const PixartConfig& config, const BuildOptions& options) {
    const ConditioningShape conditioning = {.text_width = config.text_width(),
                                            .max_text_tokens = config.model_max_length,
                                            .has_null_text = config.has_null_caption(),
                                            .takes_image_size = config.micro_condition};
    auto embed = std::make_unique<PixartEmbed>(config, conditioning, options);
    null_text_ = embed->null_caption();
    segments_.push_back(std::move(embed));
    for (int64_t i = 0; i < config.depth; ++i)
      segments_.push_back(std::make_unique<PixartBlock>(config, i, options));
    segments_.push_back(std::make_unique<PixartFinal>(config, options));
    shape_ = {.in_channels = config.in_channels,
              .out_channels = config.out_channels(),
              .input_size = config.input_size,
              .size_multiple = config.multi_scale ? config.patch_size : 0,
              .conditioning = conditioning,
              .guided_channels = config.in_channels,
              .tokens = {.width = config.hidden_size, .patch_size = config.patch_size}};
  }
};

}  // namespace

bool PixartConfig::thins(int64_t block) const {
  return kv_factor > 1 && std::find(kv_layers.begin(), kv_layers.end(), block) != kv_layers.end();
}

std::unique_ptr<Denoiser> build_pixart(const PixartConfig& config, const BuildOptions& options) {
  return std::make_unique<Pixart>(config, options);
}

}  // namespace kiln
