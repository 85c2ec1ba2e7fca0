#include "ops/cpu/onednn_scratch.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "core/cpu_level.h"
#include "ops/cpu/onednn_blocks.h"

namespace kiln::ops::cpu {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return at::divup(value, multiple) * multiple; }

// Bytes of a buffer beside its content, and of each thread's list of blocks.
constexpr int64_t kBuffer = 128, kListBytes = 640;

// A product whose operands oneDNN reads in place, with AVX-512 alone: bf16 is summed in an f32 result.
int64_t summed_apart_bytes(int64_t m, int64_t n) { return 4 * m * n + kBuffer; }

// True if oneDNN leaves an f32 product to code that reads the operands in place. So it chooses by speed.
bool is_read_in_place(int64_t m, int64_t n, int64_t k) {
  const bool has_short_k = n <= 14528 && ((m <= 768 && k <= 128) || k * m <= 49152);
  const bool is_narrow = (m >= 1000 && k <= 16 && n <= 16) || (m <= 256 && k <= 8 && n <= 1024);
  return has_short_k && !is_narrow;
}

// With AVX-512 each thread packs a chunk of the right operand, unless it is f32 with rows in memory, and its
// rows of a left one that is transposed. If the operands are bf16 it sums its block of the result in f32.
// Exact on 1000 products (onednn_blocks.h); one with a side of 1 takes less.
int64_t blocked_bytes(Product product, bool is_bf16, int64_t m, int64_t n, int64_t k, int64_t threads) {
  constexpr int64_t kLine = 64;                                          // bytes of a cache line
  constexpr int64_t kWideColumns = 64, kManyRows = 1024, kLongK = 4096;  // columns of a panel
  const int64_t element = is_bf16 ? 2 : 4, line = kLine / element;
  const bool is_power_of_two_k = (k & (k - 1)) == 0, is_power_of_two_n = (n & (n - 1)) == 0;
  const bool is_transposed = product == Product::kTransposed && m > 1;
  const bool copies_left = is_transposed || (is_bf16 && is_power_of_two_k && k >= kLongK && m >= kManyRows);
  const ProductSize size{.m = m,
                         .n = n,
                         .k = k,
                         .is_left_transposed = product == Product::kTransposed,
                         .copies_left = copies_left,
                         .is_bf16 = is_bf16};
  const ProductBlocks blocks = product_blocks(size, threads);
  const bool is_few_rows = threads > at::divup(n, kWideColumns) && m <= 40;
  const bool copies_right = is_bf16 || product == Product::kAffine || product == Product::kAdded ||
                            (n > 256 && is_power_of_two_n && !(is_few_rows && product == Product::kPlain));
  int64_t per_thread = kListBytes, buffers = product == Product::kAffine ? 2 : 1;
  if (copies_right) {
    per_thread += element * kWideColumns * round_up(blocks.chunk, is_bf16 ? 32 : 16);
    ++buffers;
  }
  if (copies_left) {
    int64_t stride = round_up(blocks.chunk, line);
    if (stride >= 512 && (stride & (stride - 1)) == 0) stride += line;
    per_thread += element * blocks.rows * stride;
    ++buffers;
  }
  if (is_bf16 || blocks.threads_along_k > 1 || product == Product::kAdded) {
    per_thread += 4 * (blocks.threads_along_k > 1 ? m * n
                       : blocks.chunk < k         ? blocks.rows * blocks.columns * blocks.column_blocks
                                                  : blocks.rows * blocks.columns);
    ++buffers;
  }
  return threads * per_thread + buffers * kBuffer;
}

// AMX. Measured by watching the allocator, one to eight threads, m, n and k from 1 to 8192. The blocks depend
// on the processor's caches; another choice is off by less than half a MiB per thread.
int64_t amx_bytes(Product product, int64_t m, int64_t n, int64_t k, int64_t threads) {
  constexpr int64_t kColumns = 64, kMaxRows = 256, kMaxChunk = 512, kLongChunk = 1024;
  // At most 256 rows of the result at a time, and fewer where the blocks would not divide evenly.
  int64_t row_blocks = at::divup(m, kMaxRows);
  while (row_blocks < m && row_blocks < 4 * threads && row_blocks * at::divup(n, kColumns) % threads != 0)
    ++row_blocks;
  const int64_t columns = std::min(round_up(n, 16), kColumns);
  int64_t rows = at::divup(m, row_blocks), chunk = round_up(std::min(k, kMaxChunk), 32), left = 0;
  if (product != Product::kTransposed && k > kLongChunk) chunk = kLongChunk;
  if (product == Product::kTransposed) {
    // Rows are split in two blocks where the result is narrow and k short.
    if (k <= kMaxChunk && n < 1024) rows = std::min<int64_t>(rows, kMaxRows / 2);
    left = rows * (k > kMaxChunk ? chunk + 16 : chunk) * 2;
  }
  return threads * (kColumns * chunk * 2 + rows * columns * 4 + left + kListBytes) +
         (product == Product::kPlain ? 384 : 512);
}

// Returns the scratch of a product that oneDNN divides among so many threads.
int64_t whole_scratch_bytes(Product product, at::ScalarType dtype, int64_t m, int64_t n, int64_t k,
                            int64_t threads) {
  if (cpu_level() < CpuLevel::kAvx512 || m == 0 || n == 0 || k == 0) return 0;
  if (dtype == at::kFloat)
    return is_read_in_place(m, n, k) ? 0 : blocked_bytes(product, /*is_bf16=*/false, m, n, k, threads);
  if (dtype != at::kBFloat16) return 0;
  switch (cpu_level()) {
    case CpuLevel::kAvx512:
      return summed_apart_bytes(m, n);
    case CpuLevel::kAmx:
      return amx_bytes(product, m, n, k, threads);
    default:
      return blocked_bytes(product, /*is_bf16=*/true, m, n, k, threads);
  }
}

// True if pieces of the product have the bits of the whole. Measured on AVX2 by comparing bits: oneDNN's
// linear layer in f32 has other code for few rows and for small weights; with AVX-512 it was not compared.
// There oneDNN has other code for few rows with a short inner product. Beside tiles, products of f32 are
// MKL's, whose sums may depend on the sides of the result.
bool is_divisible(Product product, at::ScalarType dtype, int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kManyRows = 1024, kSmallWeight = 1 << 17, kShortK = 192;
  const bool has_avx512 = cpu_level() >= CpuLevel::kAvx512;
  if (has_avx512 && k <= kShortK) return false;
  if (dtype == at::kBFloat16) return has_avx512;
  if (dtype != at::kFloat || cpu_level() == CpuLevel::kAmx) return false;
  return product != Product::kAffine || (!has_avx512 && m >= kManyRows && n * k > kSmallWeight);
}

// Returns the multiplications for which a thread takes a tenth of a millisecond or more. A linear layer's
// piece is written twice, so it has to be larger.
int64_t least_multiplications(Product product) {
  const CpuLevel level = cpu_level();
  const int64_t least = int64_t{1} << (level >= CpuLevel::kAmx ? 27 : level >= CpuLevel::kAvx512 ? 25 : 23);
  return product == Product::kAffine ? std::max(least, int64_t{1} << 27) : least;
}

}  // namespace

ProductPieces product_pieces(Product product, at::ScalarType dtype, int64_t m, int64_t n, int64_t k) {
  // Each piece packs one operand as a whole. With AVX2 that makes 256 rows 10 % slower, 512 rows 2 %.
  constexpr int64_t kMost = 32, kLeastSide = 384, kStep = 16;
  const int64_t threads = at::get_num_threads(), side = std::max(m, n),
                least = least_multiplications(product);
  if (threads == 1 || !is_divisible(product, dtype, m, n, k)) return {};
  int64_t count = 1;
  while (2 * count <= kMost && side >= 2 * count * kLeastSide && m * n * k >= 2 * count * least) count *= 2;
  // Without instructions for bf16, oneDNN divides the inner product among three threads and more: other bits.
  const bool keeps_bits = dtype == at::kBFloat16 && cpu_level() == CpuLevel::kAvx512;
  if (count == 1 || (count < 2 * threads && !keeps_bits)) return {};
  const int64_t size = round_up(at::divup(side, count), kStep);
  return {.count = at::divup(side, size), .size = size, .of_rows = m >= n};
}

int64_t product_scratch_bytes(Product product, at::ScalarType dtype, int64_t m, int64_t n, int64_t k) {
  const int64_t threads = at::get_num_threads();
  const ProductPieces pieces = product_pieces(product, dtype, m, n, k);
  if (pieces.count == 1) return whole_scratch_bytes(product, dtype, m, n, k, threads);
  const int64_t rows = pieces.of_rows ? pieces.size : m, columns = pieces.of_rows ? n : pieces.size;
  const int64_t result = product == Product::kAffine && dtype == at::kBFloat16 ? 2 * rows * columns : 0;
  return threads * (result + whole_scratch_bytes(product, dtype, rows, columns, k, /*threads=*/1));
}

namespace {

// Measured by watching the allocator, with the oneDNN of torch 2.11 on processors with AVX2, AVX-512 and AMX,
// one and two threads. Each convolution copies its weight into a layout of blocks of channels. The gradient
// of a weight is made in such a layout, converted to a plain one and copied from there. In bf16 it is summed
// in f32, over operands that are transposed in memory; where the operands are much larger than the weight,
// each thread sums for itself. AMX keeps more of its input per thread: it is off by less than a MiB.
constexpr int64_t kBlock = 16, kAvx2Block = 24;  // channels
constexpr int64_t kBatchBytes = 4096, kThreadBytes = 4120, kGradXBytes = 128, kGradWeightBytes = 8580;

int64_t element_bytes(const ConvolutionSize& size) { return size.dtype == at::kBFloat16 ? 2 : 4; }

int64_t weight_elements(const ConvolutionSize& size, int64_t out_channels, int64_t in_channels) {
  return out_channels * in_channels / size.groups * size.kernel_elements;
}

// Rounds channels up to pairs in bf16: a pair makes one f32.
int64_t inner_channels(const ConvolutionSize& size, int64_t channels) {
  return size.dtype == at::kBFloat16 ? round_up(channels, 2) : channels;
}

// True if oneDNN runs the convolution. ATen runs single small images, and pointwise ones on a single thread,
// as matrix products of its own.
bool is_onednns(const ConvolutionSize& size) {
  if (size.dtype == at::kBFloat16 || size.groups > 1) return true;
  const bool is_small = size.batch == 1 && size.in_channels * size.in_height * size.in_width <= 20480;
  const bool is_pointwise = size.kernel_elements == 1 && !size.is_strided;
  return !is_small && !(is_pointwise && size.batch < 16 && at::get_num_threads() == 1);
}

// Bytes of the patches of x as rows; 0 where the patches are x itself.
int64_t patches_bytes(const ConvolutionSize& size) {
  if (size.kernel_elements == 1 && !size.is_strided) return 0;
  return size.batch * size.in_channels * size.kernel_elements * size.out_pixels * element_bytes(size);
}

int64_t thread_bytes() { return kBatchBytes + kThreadBytes * at::get_num_threads(); }

// The f32 sums in which the gradient of a bf16 weight is accumulated.
int64_t wide_sum_bytes(const ConvolutionSize& size) {
  if (size.dtype != at::kBFloat16) return 0;
  const int64_t in_channels = round_up(size.in_channels, kBlock),
                out_channels = round_up(size.out_channels, kBlock),
                weight = weight_elements(size, out_channels, in_channels);
  const int64_t operands = in_channels * size.in_height * (size.in_width + 2 * size.padding) +
                           out_channels * size.out_pixels;  // of a sample
  const int64_t parts = size.is_strided || size.batch * operands < 2 * weight
                            ? 1
                            : std::min(size.batch, at::get_num_threads() + int64_t{0});
  return parts * (4 * weight + 2 * operands + 4 * size.out_channels) + kGradWeightBytes;
}

}  // namespace

int64_t convolution_scratch_bytes(const ConvolutionSize& size) {
  if (!is_onednns(size))
    return patches_bytes(size) +
           whole_scratch_bytes(Product::kAdded, size.dtype, size.out_pixels, size.out_channels,
                               size.in_channels * size.kernel_elements, at::get_num_threads());
  const int64_t block = cpu_level() >= CpuLevel::kAvx512 ? kBlock : kAvx2Block;
  return thread_bytes() + element_bytes(size) * weight_elements(size, round_up(size.out_channels, block),
                                                                inner_channels(size, size.in_channels));
}

int64_t convolution_grad_x_scratch_bytes(const ConvolutionSize& size) {
  if (!is_onednns(size)) return patches_bytes(size);
  const int64_t block = cpu_level() >= CpuLevel::kAvx512 ? kBlock : kAvx2Block;
  return thread_bytes() + kGradXBytes +
         element_bytes(size) * weight_elements(size, inner_channels(size, size.out_channels),
                                               round_up(size.in_channels, block));
}

int64_t convolution_grad_weight_scratch_bytes(const ConvolutionSize& size) {
  if (!is_onednns(size)) return patches_bytes(size);
  const int64_t plain = element_bytes(size) * weight_elements(size, size.out_channels, size.in_channels),
                blocked = element_bytes(size) *
                          weight_elements(size, round_up(size.out_channels, kBlock), size.in_channels),
                bias = element_bytes(size) * size.out_channels;
  const int64_t most = std::max(blocked + wide_sum_bytes(size) + bias, blocked + 2 * plain + 2 * bias);
  return most - plain - bias;
}

}  // namespace kiln::ops::cpu
