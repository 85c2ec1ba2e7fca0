// AdamW with moments of 8 bits over blocks of a tensor, in plain pointers.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "ops/kernel_args.h"

namespace kiln::ops::cpu {

inline constexpr size_t kBlock8bit = 256;

// What is nearest to a value of [-1, 1] in a table of 256, by the value's first bits: sign, exponent and the
// first of the mantissa, as many as divide its range so finely that no two midpoints between neighbours of
// the table fall into one part. An entry holds the number of midpoints below the part, and the last bits of
// the one within it, above which a value has one more below it.
struct PlaceTable {
  const float* values;      // (256): what places stand for
  const uint32_t* entries;  // of parts of [0, 1], then, if the table is signed, of those of [-1, 0]
  bool is_signed;
};
// Bits of a float that follow those that find its part; the smallest part of those that are told apart, whose
// bits are those of 2^-23; the number of parts of one sign.
constexpr int part_bits(bool is_signed) { return is_signed ? 17 : 16; }
constexpr uint32_t first_part(bool is_signed) { return 0x34000000u >> part_bits(is_signed); }
constexpr uint32_t num_parts(bool is_signed) {
  return (0x3F800000u >> part_bits(is_signed)) - first_part(is_signed) + 1;
}

// Blocks of `size` elements, of which the last one may be narrower. Element types as AdamW's.
struct Adamw8bitElements {
  size_t size;
  float* weights;
  const void* grads;
  Dtype grad_dtype;
  uint8_t *mean, *square;
  float *mean_scales, *square_scales;
  void* compute;  // or null
  Dtype compute_dtype;
  bool streams;  // `compute` around the caches
};
struct Adamw8bitFactors {
  AdamwFactors adamw;
  float beta1;
};
// The mean is in `signed_table`, the square in `unsigned_table`.
void adamw_8bit(const Adamw8bitElements& elements, const Adamw8bitFactors& factors,
                const PlaceTable& signed_table, const PlaceTable& unsigned_table, size_t begin, size_t end);

}  // namespace kiln::ops::cpu
