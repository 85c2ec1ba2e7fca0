#include "models/denoisers/dit/dit.h"

#include <fmt/ranges.h>

#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "models/parts/embeddings.h"
#include "models/parts/layers.h"
#include "ops/mixed_sum.h"
#include "ops/ops.h"

namespace kiln {
namespace {

constexpr double kLayerNormEps = 1e-6;
constexpr int64_t kFrequencySize = 256;  // width of the sinusoidal timestep embedding
constexpr double kEmbeddingStd = 0.02;

// Returns the adaLN vectors of each image: num_parts tensors (B, D), views of one projection. (sec. 3.2,
// "adaLN-Zero")
std::vector<at::Tensor> adaln_vectors(const Linear& projection, const at::Tensor& conditioning,
                                      int64_t num_parts, at::ScalarType compute_dtype) {
  const at::Tensor packed = projection.forward(conditioning, compute_dtype);  // (B, num_parts * D)
  return packed.view({packed.size(0), num_parts, packed.size(1) / num_parts}).unbind(1);
}

// Returns the residual stream (B, N, D) at the start of a segment, with the branch that the segment before
// handed on, and its modulated norm.
ops::NormedResidual enter(const State& state, const at::Tensor& shift, const at::Tensor& scale,
                          at::ScalarType compute_dtype) {
  if (!state.branch.defined())
    return ops::adaln_branch(state.hidden, shift, scale, kLayerNormEps, compute_dtype);
  return ops::gated_residual_adaln(state.hidden, state.gate, state.branch, shift, scale, kLayerNormEps,
                                   compute_dtype);
}

Linear zero_linear(const ParameterScope& scope, const std::string& name, int64_t in, int64_t out) {
  return scope.linear(name, in, out, Init::zeros());
}

// x_t, t, y -> tokens (B, N, D) f32 and SiLU(t_emb + y_emb) (B, D) f32. SiLU is applied here once, because
// all readers of the conditioning need it.
class DitEmbed : public Segment {
 public:
  DitEmbed(const DitConfig& config, const BuildOptions& options)
      : config_(config), compute_dtype_(options.compute_dtype) {
    name_ = "embed";
    const ParameterScope scope(parameters_, options);
    const int64_t width = config.hidden_size, p = config.patch_size;
    const int64_t patch_elements = config.in_channels * p * p;
    pos_embed_ = scope.add("pos_embed", {1, config.num_tokens(), width},
                           Init::constant(nn::sincos_position_table(width, config.grid(), config.grid())),
                           /*trainable=*/false);
    patches_ = {.weight = scope.add_adaptable("x_embedder.proj.weight", {width, config.in_channels, p, p},
                                              Init::xavier_uniform(patch_elements, width)),
                .bias = scope.add("x_embedder.proj.bias", {width}, Init::zeros())};
    t_linear_0_ = scope.linear("t_embedder.mlp.0", kFrequencySize, width, Init::normal(kEmbeddingStd));
    t_linear_2_ = scope.linear("t_embedder.mlp.2", width, width, Init::normal(kEmbeddingStd));
    if (config.num_labels() > 0)
      label_table_ = scope.add("y_embedder.embedding_table.weight", {config.num_labels(), width},
                               Init::normal(kEmbeddingStd));
  }

  State forward(const State&, const ModelInput& input) const override {
    const at::Tensor& x = input.x_t;
    if (x.dim() != 4 || x.size(1) != config_.in_channels || x.size(2) != config_.input_size ||
        x.size(3) != config_.input_size)
      fail("dit", "expected x_t of shape (B, {0}, {1}, {1}), got ({2})", config_.in_channels,
           config_.input_size, fmt::join(x.sizes(), ", "));
    const at::Tensor patches = patches_.forward_rows(nn::patchify(x, config_.patch_size), compute_dtype_);
    const at::Tensor t_hidden =
        t_linear_0_.forward(nn::timestep_embedding(input.timesteps, kFrequencySize), compute_dtype_);
    at::Tensor conditioning = t_linear_2_.forward(at::silu(t_hidden), compute_dtype_).to(at::kFloat);
    if (label_table_) {
      const at::Tensor& labels = input.conditioning.class_labels;
      if (!labels.defined())
        fail("dit", "class_labels are missing: the model has {} classes", config_.num_classes);
      conditioning = conditioning + ops::embedding_rows(label_table_->value, labels);
    }
    return {.hidden = ops::mixed_sum(patches, pos_embed_->value.to(at::kFloat)),
            .conditioning = at::silu(conditioning)};
  }

 private:
  DitConfig config_;
  at::ScalarType compute_dtype_;
  std::shared_ptr<Parameter> pos_embed_, label_table_;
  Conv2d patches_;
  Linear t_linear_0_, t_linear_2_;
};

class DitBlock : public Segment {
 public:
  DitBlock(const DitConfig& config, int64_t index, const BuildOptions& options)
      : compute_dtype_(options.compute_dtype), num_heads_(config.num_heads) {
    name_ = "blocks." + std::to_string(index);
    const ParameterScope scope = ParameterScope(parameters_, options).under(name_);
    const int64_t width = config.hidden_size;
    qkv_ = scope.xavier_linear("attn.qkv", width, 3 * width);
    attention_out_ = scope.xavier_linear("attn.proj", width, width);
    fc1_ = scope.xavier_linear("mlp.fc1", width, config.mlp_size());
    fc2_ = scope.xavier_linear("mlp.fc2", config.mlp_size(), width);
    adaln_ = zero_linear(scope, "adaLN_modulation.1", width, 6 * width);
  }

  State forward(const State& state, const ModelInput&) const override {
    const auto adaln = adaln_vectors(adaln_, state.conditioning, 6, compute_dtype_);
    const at::Tensor &shift_msa = adaln[0], &scale_msa = adaln[1], &gate_msa = adaln[2];
    const at::Tensor &shift_mlp = adaln[3], &scale_mlp = adaln[4], &gate_mlp = adaln[5];
    // (B, N, D): the residual stream and its modulated norm, which the branch reads.
    const auto [x, attended] = enter(state, shift_msa, scale_msa, compute_dtype_);
    const auto [middle, mixed] = ops::gated_residual_adaln(x, gate_msa, attention(attended), shift_mlp,
                                                           scale_mlp, kLayerNormEps, compute_dtype_);
    if (ops::OpChoicesScope::current().hand_on_branch)
      return {.hidden = middle, .conditioning = state.conditioning, .branch = mlp(mixed), .gate = gate_mlp};
    return {.hidden = ops::gated_residual(middle, gate_mlp, mlp(mixed)), .conditioning = state.conditioning};
  }

 private:
  at::Tensor attention(const at::Tensor& x) const {
    const int64_t head_dim = x.size(2) / num_heads_;
    const at::Tensor qkv =
        qkv_.forward(x, compute_dtype_).view({x.size(0), x.size(1), 3, num_heads_, head_dim});
    return attention_out_.forward(ops::packed_attention(qkv, 1 / std::sqrt(static_cast<double>(head_dim))),
                                  compute_dtype_);
  }

  at::Tensor mlp(const at::Tensor& x) const { return gelu_tanh_mlp(fc1_, fc2_, x, compute_dtype_); }

  at::ScalarType compute_dtype_;
  int64_t num_heads_;
  Linear qkv_, attention_out_, fc1_, fc2_, adaln_;
};

class DitFinal : public Segment {
 public:
  DitFinal(const DitConfig& config, const BuildOptions& options)
      : compute_dtype_(options.compute_dtype), patch_size_(config.patch_size), grid_(config.grid()) {
    name_ = "final";
    const ParameterScope scope = ParameterScope(parameters_, options).under("final_layer");
    const int64_t width = config.hidden_size, p = config.patch_size;
    linear_ = zero_linear(scope, "linear", width, p * p * config.out_channels());
    adaln_ = zero_linear(scope, "adaLN_modulation.1", width, 2 * width);
  }

  // -> (B, out_channels, H, W) f32
  State forward(const State& state, const ModelInput&) const override {
    const auto adaln = adaln_vectors(adaln_, state.conditioning, 2, compute_dtype_);
    const at::Tensor x = enter(state, adaln[0], adaln[1], compute_dtype_).normed;
    const at::Tensor tokens = linear_.forward(x, compute_dtype_).to(at::kFloat);
    return {.hidden = nn::unpatchify(tokens, patch_size_, grid_, grid_)};
  }

 private:
  at::ScalarType compute_dtype_;
  int64_t patch_size_, grid_;
  Linear linear_, adaln_;
};

class Dit : public Denoiser {
 public:
  Dit(const DitConfig& config, const BuildOptions& options) {
    segments_.push_back(std::make_unique<DitEmbed>(config, options));
    for (int64_t i = 0; i < config.depth; ++i)
      segments_.push_back(std::make_unique<DitBlock>(config, i, options));
    segments_.push_back(std::make_unique<DitFinal>(config, options));
    shape_ = {
        .in_channels = config.in_channels,
        .out_channels = config.out_channels(),
        .input_size = config.input_size,
        .conditioning = {.num_classes = config.num_classes, .has_null_class = config.has_null_class()},
        .guided_channels = std::min<int64_t>(3, config.in_channels),  // forward_with_cfg of the original
        .tokens = {.width = config.hidden_size, .patch_size = config.patch_size}};
  }
};

}  // namespace

std::unique_ptr<Denoiser> build_dit(const DitConfig& config, const BuildOptions& options) {
  return std::make_unique<Dit>(config, options);
}

}  // namespace kiln
