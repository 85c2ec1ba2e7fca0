// A small DiT whose weights are all random, so that no path is switched off by a zero.
#pragma once

#include <memory>

#include "core/aten.h"
#include "models/registry.h"

namespace kiln {

struct TinyDenoiser {
  int64_t in_channels = 3;
  bool learn_sigma = true;
  double class_dropout_prob = 0.1;
};

inline nlohmann::json tiny_config(const TinyDenoiser& tiny) {
  return {{"input_size", 8},
          {"patch_size", 2},
          {"in_channels", tiny.in_channels},
          {"hidden_size", 32},
          {"depth", 2},
          {"num_heads", 2},
          {"num_classes", 10},
          {"mlp_ratio", 2.0},
          {"class_dropout_prob", tiny.class_dropout_prob},
          {"learn_sigma", tiny.learn_sigma}};
}

inline std::unique_ptr<Denoiser> tiny_denoiser(const TinyDenoiser& tiny) {
  auto denoiser = build_denoiser("dit", tiny_config(tiny));
  initialize_weights(*denoiser, 0);
  at::manual_seed(11);
  const at::NoGradGuard no_grad;
  for (const auto& parameter : denoiser->parameters())
    if (parameter->trainable) parameter->value = at::randn_like(parameter->value) * 0.15;
  return denoiser;
}

}  // namespace kiln
