// AdamW with moments of 8 bits over blocks of a tensor, in plain pointers.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "ops/kernel_args.h"

namespace kiln::ops::cpu {

inline constexpr size_t kBlock8bit = 256;

// Finds the value nearest to a number of [-1, 1] in a table of 256. The number's first bits (sign, exponent
// and the first of the mantissa) name a part of its range. They are so many that no part holds two midpoints
// between neighbours of the table. A part's entry holds the number of midpoints below the part, and the last
// bits of the midpoint within it: a number above those bits has one more midpoint below it.
struct PlaceTable {
  const float* values;      // (256): the values that the places stand for
  const uint32_t* entries;  // of the parts of [0, 1], then, if the table is signed, of those of [-1, 0]
  bool is_signed;
};
// part_bits: the last bits of a float, which follow those that name its part. first_part: the smallest part
// that is told apart, by the bits of 2^-23. num_parts: the number of parts of one sign.
constexpr int part_bits(bool is_signed) { return is_signed ? 17 : 16; }
constexpr uint32_t first_part(bool is_signed) { return 0x34000000u >> part_bits(is_signed); }
constexpr uint32_t num_parts(bool is_signed) {
  return (0x3F800000u >> part_bits(is_signed)) - first_part(is_signed) + 1;
}

// A tensor of `size` elements in blocks; the last block may be narrower. Element types are those of AdamW.
struct Adamw8bitElements {
  size_t size;
  float* weights;
  const void* grads;
  Dtype grad_dtype;
  uint8_t *mean, *square;
  float *mean_scales, *square_scales;
  void* compute;  // or null
  Dtype compute_dtype;
  bool streams;  // write `compute` around the caches
};
struct Adamw8bitFactors {
  AdamwFactors adamw;
  float beta1;
};
// Steps the blocks [begin, end). The mean is in `signed_table`, the square in `unsigned_table`.
void adamw_8bit(const Adamw8bitElements& elements, const Adamw8bitFactors& factors,
                const PlaceTable& signed_table, const PlaceTable& unsigned_table, size_t begin, size_t end);

}  // namespace kiln::ops::cpu
