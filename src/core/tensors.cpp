#include "core/tensors.h"

#include "core/cpu_level.h"
#include "core/error.h"

namespace kiln {

at::DeviceType computing_device(at::Device device) {
  if (has_values(device)) return device.type();
  return DryRunScope::is_of_gpu() ? at::kCUDA : at::kCPU;
}

std::optional<std::pair<int64_t, int64_t>> range_of(const at::Tensor& integers) {
  if (integers.numel() == 0 || !has_values(integers)) return std::nullopt;
  return std::pair(integers.min().item<int64_t>(), integers.max().item<int64_t>());
}

at::ScalarType to_scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBool:
      return at::kBool;
    case Dtype::kU8:
      return at::kByte;
    case Dtype::kI8:
      return at::kChar;
    case Dtype::kI16:
      return at::kShort;
    case Dtype::kI32:
      return at::kInt;
    case Dtype::kI64:
      return at::kLong;
    case Dtype::kF16:
      return at::kHalf;
    case Dtype::kBF16:
      return at::kBFloat16;
    case Dtype::kF32:
      return at::kFloat;
    case Dtype::kF64:
      return at::kDouble;
  }
  throw std::logic_error("to_scalar_type: not a Dtype");
}

Dtype from_scalar_type(at::ScalarType type) {
  switch (type) {
    case at::kBool:
      return Dtype::kBool;
    case at::kByte:
      return Dtype::kU8;
    case at::kChar:
      return Dtype::kI8;
    case at::kShort:
      return Dtype::kI16;
    case at::kInt:
      return Dtype::kI32;
    case at::kLong:
      return Dtype::kI64;
    case at::kHalf:
      return Dtype::kF16;
    case at::kBFloat16:
      return Dtype::kBF16;
    case at::kFloat:
      return Dtype::kF32;
    case at::kDouble:
      return Dtype::kF64;
    default:
      fail("dtype", "expected a bool, integer or float tensor, got {}: it cannot be stored",
           c10::toString(type));
  }
}

at::ScalarType parse_compute_dtype(const std::string& name, std::string_view what) {
  if (const auto dtype = find_choice<at::ScalarType>(name); dtype && *dtype != at::kFloat8_e4m3fn)
    return *dtype;
  fail("dtype", "{}: expected f32, bf16 or fp16, got \"{}\"", what, name);
}

at::ScalarType cpu_product_dtype(at::ScalarType dtype) {
  const bool multiplies_bf16 = cpu_level() >= CpuLevel::kAvx512;
  const bool is_storage_only = dtype == at::kHalf || (dtype == at::kBFloat16 && !multiplies_bf16);
  return is_storage_only ? at::kFloat : dtype;
}

}  // namespace kiln
