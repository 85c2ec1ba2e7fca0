// Fills a model's weights with fresh values or with a file's tensors.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "models/model.h"

namespace kiln {

// Draws fresh weights. Each depends on (seed, its key) alone.
void initialize_weights(const ParameterList& parameters, uint64_t seed);
void initialize_weights(const Denoiser& denoiser, uint64_t seed);
// Copies weights by key, converting the dtype. Missing keys, unknown keys and wrong shapes are told, the
// first few of each, in one Error that names `source`. Computed constants (DiT's pos_embed) may be absent and
// are then computed.
void load_weights(const ParameterList& parameters, const std::map<std::string, at::Tensor>& weights,
                  const std::string& source);
void load_weights(const Denoiser& denoiser, const std::map<std::string, at::Tensor>& weights,
                  const std::string& source);

// Returns "xxh3:..." of keys, shapes and f32 values in the order of keys. Keeps little of a mapped file in
// memory.
std::string weights_fingerprint(const std::map<std::string, at::Tensor>& weights);

// Casts the weights and makes those of convolutions channels-last, as channels-last activations take them.
// For models that are no longer trained.
void freeze_convolution_weights(const ParameterList& parameters, at::ScalarType compute_dtype);

}  // namespace kiln
