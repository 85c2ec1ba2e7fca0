// What the verbs that run a model share: its names, its weights and its inputs.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "io.h"
#include "models/model.h"

namespace kiln::conformance {

// Throws Error; a name of the interface that this version does not build is told apart from an unknown one.
std::unique_ptr<Denoiser> build_known_denoiser(const std::string& model, const nlohmann::json& config,
                                               const std::string& dtype = "f32");
// The same, with the weights of a file.
std::unique_ptr<Denoiser> load_denoiser(const std::string& model, const nlohmann::json& config,
                                        const std::string& weights, const std::string& dtype = "f32");

// `labels` (any shape) with `drop` (same shape, or undefined) applied: dropped ones become the null class.
// Throws Error for labels out of range, and for drop without a null class.
at::Tensor apply_label_drop(const at::Tensor& labels, const at::Tensor& drop, const DenoiserShape& shape);

}  // namespace kiln::conformance
