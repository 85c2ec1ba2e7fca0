// The parts of a U-Net: residual blocks and transformers over features (B, C, H, W), channels-last.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "models/denoisers/unet/unet_config.h"
#include "models/parts/layers.h"

namespace kiln {

// Arguments that every part is built with.
struct UnetBuild {
  const UnetConfig& config;
  at::ScalarType dtype;  // of activations
};

// Returns the captions of a batch as (B, L, D). Throws Error unless all have L rows.
at::Tensor equal_captions(const TextRows& text, int64_t batch, int64_t width);

struct UnetResnet {
  GroupNorm norm1, norm2;
  Conv2d conv1, conv2;
  Linear time_projection;
  std::optional<Conv2d> shortcut;  // when the number of channels changes

  UnetResnet(const UnetBuild& build, const ParameterScope& scope, int64_t in, int64_t out);
  // time (B, T): SiLU of the timestep's embedding.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& time, at::ScalarType dtype) const;
};

// Self-attention, cross attention and a GEGLU feed-forward over tokens (B, N, C).
struct UnetTransformerBlock {
  int64_t num_heads;
  LayerNorm norm1, norm2, norm3;
  Linear self_q, self_k, self_v, self_out;
  Linear cross_q, cross_k, cross_v, cross_out;
  Linear gate, down;

  UnetTransformerBlock(const UnetBuild& build, const ParameterScope& scope, int64_t channels,
                       int64_t num_heads);
  // text (B, L, D)
  at::Tensor forward(at::Tensor x, const at::Tensor& text, at::ScalarType dtype) const;

 private:
  at::Tensor self_attention(const at::Tensor& x, at::ScalarType dtype) const;
  at::Tensor cross_attention(const at::Tensor& x, const at::Tensor& text, at::ScalarType dtype) const;
};

struct UnetTransformer {
  GroupNorm norm;
  std::optional<Linear> linear_in, linear_out;  // if use_linear_projection, else the convolutions
  std::optional<Conv2d> conv_in, conv_out;
  std::vector<UnetTransformerBlock> blocks;

  UnetTransformer(const UnetBuild& build, const ParameterScope& scope, int64_t channels, int64_t num_heads,
                  int64_t num_blocks);
  at::Tensor forward(const at::Tensor& x, const at::Tensor& text, at::ScalarType dtype) const;
};

}  // namespace kiln
