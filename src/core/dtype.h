// Element types, without torch. Names are those of safetensors headers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kiln {

enum class Dtype { kBool, kU8, kI8, kI16, kI32, kI64, kF16, kBF16, kF32, kF64 };

std::size_t dtype_size(Dtype dtype);       // bytes per element
std::string_view dtype_name(Dtype dtype);  // "F32", "BF16", ...
Dtype parse_dtype(std::string_view name);  // throws Error for an unknown name

// These conversions round to nearest even and keep NaN.
uint16_t float_to_bf16(float value);
float bf16_to_float(uint16_t bits);
uint16_t float_to_fp16(float value);
float fp16_to_float(uint16_t bits);

}  // namespace kiln
