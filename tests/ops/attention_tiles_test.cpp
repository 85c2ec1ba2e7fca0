// The attention kernels of matrix tiles (AMX), whose tile instructions stand here in plain code: so every
// processor with AVX-512's bf16 tests them.
#include <gtest/gtest.h>
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "core/cpu_level.h"

namespace {

// Eight tiles of 16 rows of 64 bytes.
alignas(64) unsigned char tiles[8][16][64];

void load_tile(int tile, const void* from, int64_t stride) {
  for (int row = 0; row < 16; ++row)
    std::memcpy(tiles[tile][row], static_cast<const char*>(from) + row * stride, 64);
}
void store_tile(int tile, void* to, int64_t stride) {
  for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile][row], 64);
}

template <class T>
T& element(int tile, int row, int column) {
  return reinterpret_cast<T*>(tiles[tile][row])[column];
}
float widened(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// sum (16 x 16 f32) += a (16 rows of 16 pairs) b (16 pairs of 16 columns).
void multiply_add_tiles(int sum, int a, int b) {
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 16; ++column)
      for (int k = 0; k < 32; ++k)
        element<float>(sum, row, column) +=
            widened(element<uint16_t>(a, row, k)) * widened(element<uint16_t>(b, k / 2, 2 * column + k % 2));
}

}  // namespace

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) static_cast<void>(config)
#define _tile_release() static_cast<void>(0)
#define _tile_zero(tile) std::memset(tiles[tile], 0, sizeof(tiles[tile]))
#define _tile_loadd load_tile
#define _tile_stored store_tile
#define _tile_dpbf16ps multiply_add_tiles
// Beside the program's own.
#define has_matrix_tiles emulated_has_matrix_tiles
#define tiles_forward_scratch emulated_forward_scratch
#define tiles_backward_scratch emulated_backward_scratch
#define tiles_forward_head emulated_forward_head
#define tiles_backward_head emulated_backward_head

// This file's own functions are for every processor.
#pragma GCC push_options
#include "ops/cpu/attention_tiles.cpp"
#pragma GCC pop_options

#if KILN_AVX512_KERNELS
namespace kiln::ops::cpu {
namespace {

// Rows of so many elements with room between them.
struct Tokens {
  int64_t stride;
  std::vector<uint16_t> values;
  Tokens(int64_t count, int64_t head_dim, int64_t room) : stride(head_dim + room), values(count * stride) {}
  void fill(std::mt19937& random) {
    std::uniform_int_distribution<int> bits(0x3d00, 0x3fff);  // 0.03 to 2
    for (uint16_t& value : values) value = static_cast<uint16_t>(bits(random) | (random() & 1 ? 0x8000 : 0));
  }
};

// Scratch with a mark behind it.
class Memory {
 public:
  explicit Memory(std::size_t bytes) : bytes_(bytes), data_(std::aligned_alloc(64, bytes + 64), std::free) {
    std::memset(data_.get(), 0x7f, bytes + 64);
  }
  void* get() { return data_.get(); }
  bool is_marked() const {
    const auto* end = static_cast<const unsigned char*>(data_.get()) + bytes_;
    return std::all_of(end, end + 64, [](unsigned char byte) { return byte == 0x7f; });
  }

 private:
  std::size_t bytes_;
  std::unique_ptr<void, decltype(&std::free)> data_;
};

struct Results {
  Tokens out, grad_q;
  std::vector<float> log2_sum, grad_k, grad_v;
};

// The results of tiles, or of the kernels for vectors of any width.
Results attended(const AttentionSizes& sizes, bool by_tiles) {
  const auto [num_queries, num_keys, head_dim] = sizes;
  std::mt19937 random(7);
  Tokens q(num_queries, head_dim, 6), k(num_keys, head_dim, 2 * head_dim), v(num_keys, head_dim, 0),
      grad(num_queries, head_dim, 10);
  for (Tokens* tokens : {&q, &k, &v, &grad}) tokens->fill(random);
  const int64_t sum_stride = head_dim + 4;
  const auto floats = [](int64_t count) { return std::vector<float>(static_cast<size_t>(count)); };
  Results results{Tokens(num_queries, head_dim, 10), Tokens(num_queries, head_dim, 2), floats(num_queries),
                  floats(num_keys * sum_stride), floats(num_keys * sum_stride)};
  const float scale = 0.3f;
  const AttentionForward forward{.q = q.values.data(),
                                 .q_stride = q.stride,
                                 .k = k.values.data(),
                                 .v = v.values.data(),
                                 .k_stride = k.stride,
                                 .v_stride = v.stride,
                                 .out = results.out.values.data(),
                                 .out_stride = results.out.stride,
                                 .log2_sum = results.log2_sum.data(),
                                 .num_keys = num_keys,
                                 .head_dim = head_dim,
                                 .scale = scale};
  const AttentionBackward backward{.q = q.values.data(),
                                   .q_stride = q.stride,
                                   .k = k.values.data(),
                                   .v = v.values.data(),
                                   .k_stride = k.stride,
                                   .v_stride = v.stride,
                                   .out = results.out.values.data(),
                                   .grad_out = grad.values.data(),
                                   .out_stride = grad.stride,
                                   .log2_sum = results.log2_sum.data(),
                                   .grad_q = results.grad_q.values.data(),
                                   .grad_q_stride = results.grad_q.stride,
                                   .grad_k = results.grad_k.data(),
                                   .grad_v = results.grad_v.data(),
                                   .grad_kv_stride = sum_stride,
                                   .sum_type = AttentionType::kF32,
                                   .num_queries = num_queries,
                                   .num_keys = num_keys,
                                   .head_dim = head_dim,
                                   .scale = scale};
  constexpr AttentionType kType = AttentionType::kBF16;
  Memory ahead(by_tiles ? emulated_forward_scratch(sizes) : vector_forward_scratch(kType, sizes));
  for (int64_t row = 0; row < num_queries; row += kVectorQueries) {
    const int64_t end = std::min(num_queries, row + kVectorQueries);
    by_tiles ? emulated_forward_head(forward, row, end, ahead.get())
             : vector_forward_head(kType, forward, row, end, ahead.get());
  }
  Memory back(by_tiles ? emulated_backward_scratch(sizes) : vector_backward_scratch(kType, sizes));
  by_tiles ? emulated_backward_head(backward, back.get()) : vector_backward_head(kType, backward, back.get());
  EXPECT_TRUE(ahead.is_marked() && back.is_marked()) << "written beyond the scratch";
  return results;
}

void expect_near(const std::vector<float>& tiled, const std::vector<float>& expected, const char* what) {
  float largest = 0, difference = 0;
  for (size_t i = 0; i < tiled.size(); ++i) {
    largest = std::max(largest, std::abs(expected[i]));
    difference = std::max(difference, std::abs(tiled[i] - expected[i]));
  }
  EXPECT_LE(difference, 0.01f * largest) << what;  // products of weights that are rounded to bf16
}

std::vector<float> floats_of(const Tokens& tokens) {
  std::vector<float> values;
  for (const uint16_t bits : tokens.values) values.push_back(widened(bits));
  return values;
}

TEST(AttentionTiles, EqualTheKernelsForVectors) {
  if (cpu_level_of_machine() < CpuLevel::kAvx512Bf16) GTEST_SKIP() << "no products of bf16";
  for (const AttentionSizes& sizes :
       {AttentionSizes{33, 70, 22}, {70, 33, 64}, {130, 5, 72}, {20, 300, 16}, {96, 96, 40}, {7, 200, 8}}) {
    SCOPED_TRACE(::testing::Message() << sizes.num_queries << " queries, " << sizes.num_keys << " keys, "
                                      << sizes.head_dim << " elements");
    const Results tiled = attended(sizes, true), expected = attended(sizes, false);
    expect_near(floats_of(tiled.out), floats_of(expected.out), "out");
    expect_near(tiled.log2_sum, expected.log2_sum, "sums");
    expect_near(floats_of(tiled.grad_q), floats_of(expected.grad_q), "gradient of q");
    expect_near(tiled.grad_k, expected.grad_k, "gradient of k");
    expect_near(tiled.grad_v, expected.grad_v, "gradient of v");
  }
}

}  // namespace
}  // namespace kiln::ops::cpu
#endif
