#include "models/denoisers/unet/unet.h"

#include <fmt/ranges.h>

#include <optional>

#include "core/aten.h"
#include "core/error.h"
#include "models/denoisers/unet/unet_blocks.h"
#include "models/parts/embeddings.h"

namespace kiln {
namespace {

constexpr int64_t kTextRows = 77;  // of CLIP

// x_t, t -> features (B, C, H, W) in compute dtype and SiLU(t_emb) (B, T) f32, which every residual block
// projects. The features are the first skip.
class UnetEmbed : public Segment {
 public:
  UnetEmbed(const UnetConfig& config, const BuildOptions& options)
      : config_(config), dtype_(options.compute_dtype) {
    name_ = "embed";
    const ParameterScope scope(parameters_, options);
    const int64_t width = config.block_out_channels.front(), time_width = config.time_width();
    conv_in_ = scope.conv2d("conv_in", config.in_channels, width, 3, 1, 1);
    linear_1_ = scope.uniform_linear("time_embedding.linear_1", width, time_width);
    linear_2_ = scope.uniform_linear("time_embedding.linear_2", time_width, time_width);
  }

  SkipUse skips() const override { return {.pushes = 1}; }

  State forward(const State&, const ModelInput& input) const override {
    const at::Tensor& x = input.x_t;
    if (x.dim() != 4 || x.size(1) != config_.in_channels)
      fail("unet", "expected x_t of shape (B, {}, H, W), got ({})", config_.in_channels,
           fmt::join(x.sizes(), ", "));
    const at::Tensor sinusoids = nn::timestep_embedding(input.timesteps, config_.block_out_channels.front(),
                                                        config_.flip_sin_to_cos, config_.freq_shift);
    const at::Tensor time = linear_2_.forward(at::silu(linear_1_.forward(sinusoids, dtype_)), dtype_);
    const at::Tensor features =
        conv_in_.forward(x.to(dtype_).contiguous(at::MemoryFormat::ChannelsLast), dtype_);
    return {.hidden = features, .conditioning = at::silu(time.to(at::kFloat)), .skips = {features}};
  }

 private:
  UnetConfig config_;
  at::ScalarType dtype_;
  Conv2d conv_in_;
  Linear linear_1_, linear_2_;
};

// The shape of a segment of a level.
struct LevelPart {
  int64_t in, out;  // channels
  int64_t num_heads, num_transformer_blocks;
  bool has_attention;
};

std::optional<UnetTransformer> transformer_of(const UnetBuild& build, const ParameterScope& scope,
                                              const LevelPart& part) {
  if (!part.has_attention) return std::nullopt;
  return UnetTransformer(build, scope, part.out, part.num_heads, part.num_transformer_blocks);
}

// A residual block and its transformer. The last segment of a level may also halve the size. Each result is a
// skip.
class UnetDown : public Segment {
 public:
  UnetDown(const UnetConfig& config, const BuildOptions& options, int64_t level, int64_t index,
           const LevelPart& part, bool halves)
      : dtype_(options.compute_dtype), text_width_(config.cross_attention_dim) {
    name_ = fmt::format("down.{}.{}", level, index);
    const ParameterScope scope =
        ParameterScope(parameters_, options).under("down_blocks." + std::to_string(level));
    const UnetBuild build{config, dtype_};
    resnet_.emplace(build, scope.under("resnets." + std::to_string(index)), part.in, part.out);
    transformer_ = transformer_of(build, scope.under("attentions." + std::to_string(index)), part);
    if (halves) downsample_ = scope.conv2d("downsamplers.0.conv", part.out, part.out, 3, /*stride=*/2, 1);
  }

  SkipUse skips() const override { return {.pushes = downsample_ ? 2 : 1}; }

  State forward(const State& state, const ModelInput& input) const override {
    at::Tensor x = resnet_->forward(state.hidden, state.conditioning, dtype_);
    if (transformer_)
      x = transformer_->forward(x, equal_captions(input.conditioning.text, x.size(0), text_width_), dtype_);
    if (!downsample_) return {.hidden = x, .conditioning = state.conditioning, .skips = {x}};
    const at::Tensor halved = downsample_->forward(x, dtype_);
    return {.hidden = halved, .conditioning = state.conditioning, .skips = {x, halved}};
  }

 private:
  at::ScalarType dtype_;
  int64_t text_width_;
  std::optional<UnetResnet> resnet_;
  std::optional<UnetTransformer> transformer_;
  std::optional<Conv2d> downsample_;
};

class UnetMid : public Segment {
 public:
  UnetMid(const UnetConfig& config, const BuildOptions& options)
      : dtype_(options.compute_dtype), text_width_(config.cross_attention_dim) {
    name_ = "mid";
    const ParameterScope scope = ParameterScope(parameters_, options).under("mid_block");
    const UnetBuild build{config, dtype_};
    const int64_t width = config.block_out_channels.back();
    resnet_0_.emplace(build, scope.under("resnets.0"), width, width);
    transformer_.emplace(build, scope.under("attentions.0"), width, config.num_heads.back(),
                         config.transformer_layers_per_block.back());
    resnet_1_.emplace(build, scope.under("resnets.1"), width, width);
  }

  State forward(const State& state, const ModelInput& input) const override {
    at::Tensor x = resnet_0_->forward(state.hidden, state.conditioning, dtype_);
    x = transformer_->forward(x, equal_captions(input.conditioning.text, x.size(0), text_width_), dtype_);
    return {.hidden = resnet_1_->forward(x, state.conditioning, dtype_), .conditioning = state.conditioning};
  }

 private:
  at::ScalarType dtype_;
  int64_t text_width_;
  std::optional<UnetResnet> resnet_0_, resnet_1_;
  std::optional<UnetTransformer> transformer_;
};

// A residual block on the features and a skip, and its transformer. The first segment of a level, except the
// lowest, first enlarges the features to the skip's size, with the convolution of the level below.
class UnetUp : public Segment {
 public:
  // part.in: channels of the features and the skip together. enlarged: channels of the features if they are
  // enlarged, else 0.
  UnetUp(const UnetConfig& config, const BuildOptions& options, int64_t level, int64_t index,
         const LevelPart& part, int64_t enlarged)
      : dtype_(options.compute_dtype), text_width_(config.cross_attention_dim) {
    name_ = fmt::format("up.{}.{}", level, index);
    const ParameterScope root(parameters_, options);
    const ParameterScope scope = root.under("up_blocks." + std::to_string(level));
    const UnetBuild build{config, dtype_};
    if (enlarged > 0)
      upsample_ = root.under("up_blocks." + std::to_string(level - 1))
                      .conv2d("upsamplers.0.conv", enlarged, enlarged, 3, 1, 1);
    resnet_.emplace(build, scope.under("resnets." + std::to_string(index)), part.in, part.out);
    transformer_ = transformer_of(build, scope.under("attentions." + std::to_string(index)), part);
  }

  SkipUse skips() const override { return {.pops = 1}; }

  State forward(const State& state, const ModelInput& input) const override {
    const at::Tensor& skip = state.skips.front();
    at::Tensor x = state.hidden;
    if (upsample_) x = upsample_->forward(at::upsample_nearest2d(x, {skip.size(2), skip.size(3)}), dtype_);
    x = resnet_->forward(at::cat({x, skip}, 1), state.conditioning, dtype_);
    if (transformer_)
      x = transformer_->forward(x, equal_captions(input.conditioning.text, x.size(0), text_width_), dtype_);
    return {.hidden = x, .conditioning = state.conditioning};
  }

 private:
  at::ScalarType dtype_;
  int64_t text_width_;
  std::optional<Conv2d> upsample_;
  std::optional<UnetResnet> resnet_;
  std::optional<UnetTransformer> transformer_;
};

class UnetFinal : public Segment {
 public:
  UnetFinal(const UnetConfig& config, const BuildOptions& options) : dtype_(options.compute_dtype) {
    name_ = "final";
    const ParameterScope scope(parameters_, options);
    const int64_t width = config.block_out_channels.front();
    norm_ = scope.group_norm("conv_norm_out", width, config.norm_num_groups, config.norm_eps);
    conv_out_ = scope.conv2d("conv_out", width, config.out_channels, 3, 1, 1);
  }

  // -> (B, out_channels, H, W) f32
  State forward(const State& state, const ModelInput&) const override {
    const at::Tensor out = conv_out_.forward_normed(norm_, /*silu=*/true, state.hidden, dtype_);
    return {.hidden = out.to(at::kFloat).contiguous()};
  }

 private:
  at::ScalarType dtype_;
  GroupNorm norm_;
  Conv2d conv_out_;
};

class Unet : public Denoiser {
 public:
  Unet(const UnetConfig& config, const BuildOptions& options) {
    segments_.push_back(std::make_unique<UnetEmbed>(config, options));
    add_down(config, options);
    segments_.push_back(std::make_unique<UnetMid>(config, options));
    add_up(config, options);
    segments_.push_back(std::make_unique<UnetFinal>(config, options));
    shape_ = {.in_channels = config.in_channels,
              .out_channels = config.out_channels,
              .input_size = config.sample_size,
              .size_multiple = 1,
              .conditioning = {.text_width = config.cross_attention_dim,
                               .max_text_tokens = kTextRows,
                               .pads_text = true},
              .guided_channels = config.in_channels};
  }

 private:
  void add_down(const UnetConfig& config, const BuildOptions& options) {
    skip_channels_ = {config.block_out_channels.front()};
    int64_t channels = config.block_out_channels.front();
    for (int64_t level = 0; level < config.num_levels(); ++level) {
      for (int64_t i = 0; i < config.layers_per_block[level]; ++i) {
        LevelPart part = part_of(config, level, config.down_attention[level]);
        part.in = std::exchange(channels, part.out);
        const bool halves = i + 1 == config.layers_per_block[level] && level + 1 < config.num_levels();
        segments_.push_back(std::make_unique<UnetDown>(config, options, level, i, part, halves));
        skip_channels_.insert(skip_channels_.end(), halves ? 2 : 1, channels);
      }
    }
  }

  void add_up(const UnetConfig& config, const BuildOptions& options) {
    int64_t channels = config.block_out_channels.back();
    for (int64_t up = 0; up < config.num_levels(); ++up) {
      const int64_t level = config.num_levels() - 1 - up;
      for (int64_t i = 0; i <= config.layers_per_block[level]; ++i) {
        const int64_t enlarged = i == 0 && up > 0 ? channels : 0;
        LevelPart part = part_of(config, level, config.up_attention[up]);
        part.in = std::exchange(channels, part.out) + skip_channels_.back();
        skip_channels_.pop_back();
        segments_.push_back(std::make_unique<UnetUp>(config, options, up, i, part, enlarged));
      }
    }
  }

  static LevelPart part_of(const UnetConfig& config, int64_t level, bool has_attention) {
    return {.in = 0,
            .out = config.block_out_channels[level],
            .num_heads = config.num_heads[level],
            .num_transformer_blocks = config.transformer_layers_per_block[level],
            .has_attention = has_attention};
  }

  std::vector<int64_t> skip_channels_;  // of the stack while the model is built
};

}  // namespace

std::unique_ptr<Denoiser> build_unet(const UnetConfig& config, const BuildOptions& options) {
  return std::make_unique<Unet>(config, options);
}

}  // namespace kiln
