// Bridges between torch-free types and at::Tensor.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

#include "core/dtype.h"

namespace kiln {

at::ScalarType to_scalar_type(Dtype dtype);
Dtype from_scalar_type(at::ScalarType type);
// "f32" | "bf16" | "fp16"; throws Error, which says that `what` expects one of them.
at::ScalarType parse_compute_dtype(const std::string& name, std::string_view what = "a dtype");

}  // namespace kiln
