// The distribution of a fresh weight, as data, so that it can be listed and tested.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace kiln {

struct Init {
  enum class Kind { kZeros, kOnes, kNormal, kUniform, kXavierUniform, kValue };
  Kind kind = Kind::kZeros;
  double scale = 0;                 // standard deviation (kNormal), bound (kUniform)
  int64_t fan_in = 0, fan_out = 0;  // kXavierUniform: bound = sqrt(6 / (fan_in + fan_out))
  at::Tensor value{};               // kValue: a computed constant such as a position table

  static Init zeros() { return {}; }
  static Init ones() { return {.kind = Kind::kOnes}; }
  static Init normal(double std) { return {.kind = Kind::kNormal, .scale = std}; }
  static Init uniform(double bound) { return {.kind = Kind::kUniform, .scale = bound}; }
  static Init xavier_uniform(int64_t fan_in, int64_t fan_out) {
    return {.kind = Kind::kXavierUniform, .fan_in = fan_in, .fan_out = fan_out};
  }
  static Init constant(at::Tensor value);
};

// Fills an f32 CPU tensor. Draws depend on (seed, key) alone (Philox), so adding a weight changes no other.
void initialize(const Init& init, uint64_t seed, const std::string& key, at::Tensor& out);

}  // namespace kiln
