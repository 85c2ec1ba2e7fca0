// What the verbs that run a model share: its names, its weights and its inputs.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "io.h"
#include "models/model.h"

namespace kiln::conformance {

// `config`: a file. Throws Error; a name of the interface that this version does not build is told apart from
// an unknown one.
std::unique_ptr<Denoiser> build_known_denoiser(const std::string& model, const std::string& config,
                                               const std::string& dtype = "f32");
// The same, with the weights of a file.
std::unique_ptr<Denoiser> load_denoiser(const std::string& model, const std::string& config,
                                        const std::string& weights, const std::string& dtype = "f32");

// `y` with `drop` applied where that is given, both of `sizes`: dropped labels become the null class.
// Undefined for a model without classes. Throws Error for labels out of range, and for drop without a null
// class.
at::Tensor read_labels(const Inputs& inputs, at::IntArrayRef sizes, const DenoiserShape& shape);

}  // namespace kiln::conformance
