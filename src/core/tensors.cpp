#include "core/tensors.h"

#include "core/cpu_level.h"
#include "core/error.h"

namespace kiln {

namespace {

constexpr std::pair<Dtype, at::ScalarType> kDtypesOfTorch[] = {
    {Dtype::kBool, at::kBool}, {Dtype::kU8, at::kByte},       {Dtype::kI8, at::kChar},
    {Dtype::kI16, at::kShort}, {Dtype::kI32, at::kInt},       {Dtype::kI64, at::kLong},
    {Dtype::kF16, at::kHalf},  {Dtype::kBF16, at::kBFloat16}, {Dtype::kF32, at::kFloat},
    {Dtype::kF64, at::kDouble}};

}  // namespace

at::DeviceType computing_device(at::Device device) {
  if (has_values(device)) return device.type();
  return DryRunScope::is_of_gpu() ? at::kCUDA : at::kCPU;
}

std::optional<std::pair<int64_t, int64_t>> range_of(const at::Tensor& integers) {
  if (integers.numel() == 0 || !has_values(integers)) return std::nullopt;
  return std::pair(integers.min().item<int64_t>(), integers.max().item<int64_t>());
}

at::ScalarType to_scalar_type(Dtype dtype) {
  for (const auto& [ours, theirs] : kDtypesOfTorch)
    if (ours == dtype) return theirs;
  throw std::logic_error("to_scalar_type: not a Dtype");
}

Dtype from_scalar_type(at::ScalarType type) {
  for (const auto& [ours, theirs] : kDtypesOfTorch)
    if (theirs == type) return ours;
  fail("dtype", "expected a bool, integer or float tensor, got {}: it cannot be stored", c10::toString(type));
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
