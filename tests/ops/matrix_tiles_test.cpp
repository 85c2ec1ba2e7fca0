// The kernels of matrix tiles (AMX), whose tile instructions stand here in plain code: so every processor
// with AVX-512's bf16 tests them.
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
#define tiles_forward_scratch emulated_forward_scratch
#define tiles_backward_scratch emulated_backward_scratch
#define tiles_forward_head emulated_forward_head
#define tiles_backward_head emulated_backward_head
#define tiles_multiply_patches emulated_multiply_patches
#define tiles_multiply_grad emulated_multiply_grad

// This file's own functions are for every processor.
#pragma GCC push_options
#include "ops/cpu/attention_tiles.cpp"
#include "ops/cpu/pictures/convolution_tiles.cpp"
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

// A convolution with everything that it reads and writes.
struct ConvolutionCase {
  Conv3x3 conv;
  Tokens x, grad, weight, bias;

  explicit ConvolutionCase(const Conv3x3& sizes)
      : conv(sizes),
        x(sizes.batch * sizes.height * sizes.width, sizes.in_channels, 0),
        grad(sizes.batch * sizes.out_height * sizes.out_width, sizes.out_channels, 0),
        weight(sizes.out_channels, 9 * sizes.in_channels, 0),
        bias(1, sizes.out_channels, 0) {
    std::mt19937 random(7);
    for (Tokens* values : {&x, &grad, &weight, &bias}) values->fill(random);
  }

  // Calls body(pixel of the result, pixel of x, tap) for all that meet.
  template <class Body>
  void for_taps(const Body& body) const {
    for (int64_t sample = 0; sample < conv.batch; ++sample)
      for (int64_t y = 0; y < conv.out_height; ++y)
        for (int64_t column = 0; column < conv.out_width; ++column)
          for (int64_t tap = 0; tap < 9; ++tap) {
            const int64_t row = y * conv.stride + tap / 3 - conv.padding,
                          place = column * conv.stride + tap % 3 - conv.padding;
            if (row < 0 || row >= conv.height || place < 0 || place >= conv.width) continue;
            body((sample * conv.out_height + y) * conv.out_width + column,
                 (sample * conv.height + row) * conv.width + place, tap);
          }
  }
  // The result, or the gradient of x, in plain code.
  std::vector<float> patches_in_plain_code(bool is_grad_x) const {
    std::vector<float> result(is_grad_x ? x.values.size() : grad.values.size());
    for (size_t i = 0; i < result.size() && !is_grad_x; ++i)
      result[i] = widened(bias.values[i % bias.values.size()]);
    for_taps([&](int64_t out, int64_t in, int64_t tap) {
      for (int64_t o = 0; o < conv.out_channels; ++o)
        for (int64_t c = 0; c < conv.in_channels; ++c) {
          const float w = widened(weight.values[o * weight.stride + 9 * c + tap]);
          if (is_grad_x)
            result[in * x.stride + c] += w * widened(grad.values[out * grad.stride + o]);
          else
            result[out * grad.stride + o] += w * widened(x.values[in * x.stride + c]);
        }
    });
    return result;
  }
  std::vector<float> grad_in_plain_code() const {
    std::vector<float> result(weight.values.size());
    for_taps([&](int64_t out, int64_t in, int64_t tap) {
      for (int64_t o = 0; o < conv.out_channels; ++o)
        for (int64_t c = 0; c < conv.in_channels; ++c)
          result[o * weight.stride + 9 * c + tap] +=
              widened(grad.values[out * grad.stride + o]) * widened(x.values[in * x.stride + c]);
    });
    return result;
  }

  std::vector<float> patches_by_tiles(bool is_grad_x) const {
    Tokens result = is_grad_x ? x : grad;
    const PatchProduct product{.conv = conv,
                               .is_grad_x = is_grad_x,
                               .values = (is_grad_x ? grad : x).values.data(),
                               .weight = weight.values.data(),
                               .bias = is_grad_x ? nullptr : bias.values.data(),
                               .result = result.values.data()};
    Memory patches(static_cast<size_t>(patches_bytes(product)));
    for (int64_t piece = 0; piece < num_patch_pieces(product); ++piece)
      avx512_pack_patches(product, piece, patches.get());
    for (int64_t row = 0; row < product.rows(); row += kPatchRows)
      for (int64_t pixel = 0; pixel < product.pixels(); pixel += kPatchPixels)
        emulated_multiply_patches(product, patches.get(), row, pixel);
    EXPECT_TRUE(patches.is_marked()) << "written beyond the patches";
    return floats_of(result);
  }
  std::vector<float> grad_by_tiles() const {
    Tokens result = weight;
    const WeightGradient product{
        .conv = conv, .x = x.values.data(), .grad = grad.values.data(), .result = result.values.data()};
    Memory packed(static_cast<size_t>(packed_grad_bytes(product))),
        scratch(static_cast<size_t>(weight_gradient_scratch(product)));
    for (int64_t pixel = 0; pixel < product.pixels(); pixel += kGradPixels)
      pack_grad(product, pixel, packed.get());
    for (int64_t in = 0; in < conv.in_channels; in += kGradChannels)
      for (int64_t out = 0; out < conv.out_channels; out += 2 * kGradRows)
        emulated_multiply_grad(product, packed.get(), in, out,
                               std::min(2 * kGradRows, conv.out_channels - out), scratch.get());
    EXPECT_TRUE(packed.is_marked() && scratch.is_marked()) << "written beyond the scratch";
    return floats_of(result);
  }
};

TEST(ConvolutionTiles, EqualPlainCode) {
  if (cpu_level_of_machine() < CpuLevel::kAvx512Bf16) GTEST_SKIP() << "no products of bf16";
  for (const Conv3x3& sizes : {Conv3x3{Dtype::kBF16, 3, 4, 4, 64, 4, 4, 96, 1, 1},
                               Conv3x3{Dtype::kBF16, 2, 13, 11, 32, 13, 11, 32, 1, 1},
                               Conv3x3{Dtype::kBF16, 2, 9, 7, 96, 5, 4, 64, 2, 1},
                               Conv3x3{Dtype::kBF16, 1, 3, 5, 32, 5, 7, 160, 1, 2}}) {
    SCOPED_TRACE(::testing::Message() << sizes.in_channels << " to " << sizes.out_channels << " channels");
    const ConvolutionCase convolution(sizes);
    expect_near(convolution.patches_by_tiles(false), convolution.patches_in_plain_code(false), "forward");
    if (sizes.stride == 1)
      expect_near(convolution.patches_by_tiles(true), convolution.patches_in_plain_code(true),
                  "gradient of x");
    expect_near(convolution.grad_by_tiles(), convolution.grad_in_plain_code(), "gradient of the weight");
  }
}

}  // namespace
}  // namespace kiln::ops::cpu
#endif
