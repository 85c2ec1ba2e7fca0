// Products of bf16 matrices by matrix tiles (AMX). A tile is 16 rows of 64 bytes. A product C = A B takes A
// as rows of bf16 with the contraction along them. It takes B in units of 32 bits, each a pair of elements
// that follow each other along the contraction; 16 units of 16 columns are a tile. Sums are f32. As with
// every such header, nothing from a shared one may be instantiated after this include.
#pragma once
#include "ops/cpu/avx512-inl.h"

#pragma GCC target("amx-tile,amx-bf16")

namespace kiln::ops::cpu {
namespace {

constexpr int64_t kTileSide = 16;   // rows of a tile, and its columns in units
constexpr int64_t kTileDepth = 32;  // elements of a contraction that one instruction takes

// While in scope, all eight tiles of this thread have their full size.
class TilesInUse {
 public:
  KILN_INLINE TilesInUse() {
    alignas(64) uint8_t config[64] = {1};  // palette 1
    for (int tile = 0; tile < 8; ++tile) {
      config[16 + 2 * tile] = 64;     // bytes of a row
      config[48 + tile] = kTileSide;  // rows
    }
    _tile_loadconfig(config);
  }
  KILN_INLINE ~TilesInUse() { _tile_release(); }
};

// Rounds up to an odd number of cache lines, so that rows of a tile do not collide in the cache.
KILN_INLINE int64_t odd_lines(int64_t elements, int64_t per_line) {
  return ((elements + per_line - 1) / per_line | 1) * per_line;
}

// C (16 R x 16 C at `out`) = A (16 R x 32 depth) B (16 depth units x 16 C), or C += A B. Strides are in
// bytes.
template <int R, int C, bool kAdds = false>
KILN_INLINE void multiply_tiles(const void* a, int64_t a_stride, const void* b, int64_t b_stride,
                                int64_t depth, float* out, int64_t out_stride) {
  char* const to = reinterpret_cast<char*>(out);
  const auto* rows = static_cast<const char*>(a);
  const auto* units = static_cast<const char*>(b);
  if constexpr (kAdds) {
    _tile_loadd(0, to, out_stride);
    if constexpr (C > 1) _tile_loadd(1, to + 64, out_stride);
    if constexpr (R > 1) _tile_loadd(2, to + 16 * out_stride, out_stride);
    if constexpr (R > 1 && C > 1) _tile_loadd(3, to + 16 * out_stride + 64, out_stride);
  } else {
    _tile_zero(0);
    if constexpr (C > 1) _tile_zero(1);
    if constexpr (R > 1) _tile_zero(2);
    if constexpr (R > 1 && C > 1) _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; ++k) {
    _tile_loadd(4, rows, a_stride);
    _tile_loadd(6, units, b_stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (C > 1) {
      _tile_loadd(7, units + 64, b_stride);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (R > 1) {
      _tile_loadd(5, rows + 16 * a_stride, a_stride);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (C > 1) _tile_dpbf16ps(3, 5, 7);
    }
    rows += 64;
    units += 16 * b_stride;
  }
  _tile_stored(0, to, out_stride);
  if constexpr (C > 1) _tile_stored(1, to + 64, out_stride);
  if constexpr (R > 1) _tile_stored(2, to + 16 * out_stride, out_stride);
  if constexpr (R > 1 && C > 1) _tile_stored(3, to + 16 * out_stride + 64, out_stride);
}

}  // namespace
}  // namespace kiln::ops::cpu
