// Bridges between torch-free types and at::Tensor.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/choices.h"
#include "core/dry_run.h"
#include "core/dtype.h"

namespace kiln {

// False in a dry run, whose tensors are on meta: they have shapes and take memory, but hold no values.
inline bool has_values(at::Device device) { return !device.is_meta(); }
inline bool has_values(const at::Tensor& tensor) { return !tensor.is_meta(); }

// Returns the least and the largest of integers; nothing if there are none, or in a dry run.
std::optional<std::pair<int64_t, int64_t>> range_of(const at::Tensor& integers);

// Returns the kind of device that computes: for meta the one that this thread's dry run stands for.
at::DeviceType computing_device(at::Device device);
// Returns the dry run that stands for `device`.
inline DryRunDevice dry_run_of(at::Device device) {
  return computing_device(device) == at::kCPU ? DryRunDevice::kCpu : DryRunDevice::kCuda;
}

at::ScalarType to_scalar_type(Dtype dtype);
Dtype from_scalar_type(at::ScalarType type);
// The dtypes that models compute in. fp8 is only for large products in training.
template <>
struct Choices<at::ScalarType> {
  static constexpr std::pair<at::ScalarType, const char*> kAll[] = {
      {at::kFloat, "f32"}, {at::kBFloat16, "bf16"}, {at::kHalf, "fp16"}, {at::kFloat8_e4m3fn, "fp8"}};
};
// Parses "f32", "bf16" or "fp16". Throws Error naming `what` for anything else.
at::ScalarType parse_compute_dtype(const std::string& name, std::string_view what = "a dtype");

// Returns the dtype in which this CPU multiplies matrices of `dtype`: f32 for fp16, and for bf16 without
// AVX-512. The libraries have no fast products of those, theirs take a hundred times as long.
at::ScalarType cpu_product_dtype(at::ScalarType dtype);

}  // namespace kiln
