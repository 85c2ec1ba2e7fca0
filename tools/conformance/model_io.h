// What the verbs that run a model share: its names, its weights and its inputs.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "io.h"
#include "models/model.h"

namespace kiln::conformance {

// `config`: a file. Throws Error.
std::unique_ptr<Denoiser> build_known_denoiser(const std::string& model, const std::string& config,
                                               const std::string& dtype = "f32");

// A model with a file's weights. The file's keys may be others than the model's (Sana's repository's).
struct LoadedDenoiser {
  std::unique_ptr<Denoiser> denoiser;
  std::function<Tensors(const Tensors&)> in_file_keys;  // tensors by the model's keys, weights or gradients
};
LoadedDenoiser load_denoiser(const std::string& model, const std::string& config, const std::string& weights,
                             const std::string& dtype = "f32");

// What the inputs say of the conditioning that a model takes: `y`; `caption_embeds` or
// `encoder_hidden_states` with `caption_mask`; `img_hw`, `aspect_ratio`; `guidance`; and `drop`, which makes
// a label the null class and a caption the learned null rows. `sizes`: the leading dimensions of each, (B) or
// (N, B); the result has a sample for each of their product. `prefix` stands before every name. Throws Error
// for what is missing or does not fit.
Conditioning read_conditioning(const Inputs& inputs, at::IntArrayRef sizes, const DenoiserShape& shape,
                               const std::string& prefix = "");

}  // namespace kiln::conformance
