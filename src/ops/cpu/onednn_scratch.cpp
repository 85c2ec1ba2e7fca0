#include "ops/cpu/onednn_scratch.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "ops/cpu/instruction_set.h"

namespace kiln::ops::cpu {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return at::divup(value, multiple) * multiple; }

// Measured by watching the allocator, with the oneDNN of torch 2.11 on AVX-512 processors, one to eight
// threads, m, n and k from 1 to 8192. Each thread packs panels of its operands: a chunk of k by 64 columns of
// the right one, and its rows of a left one that is transposed. If the operands are bf16 it sums its rows of
// the result in f32. The blocks that oneDNN takes depend on the processor's caches; another choice is off by
// less than half a MiB per thread.
constexpr int64_t kColumns = 64, kMaxRows = 256, kMaxChunk = 512, kLongChunk = 1024;

// Returns the rows of the result that a thread takes at a time: at most 256, and fewer where the blocks would
// not divide evenly.
int64_t row_block(int64_t m, int64_t n, int64_t threads) {
  int64_t blocks = at::divup(m, kMaxRows);
  while (blocks < m && blocks < 4 * threads && blocks * at::divup(n, kColumns) % threads != 0) ++blocks;
  return at::divup(m, blocks);
}

int64_t bf16_bytes(Product product, int64_t m, int64_t n, int64_t k, int64_t threads) {
  const int64_t columns = std::min(round_up(n, 16), kColumns);
  int64_t rows = row_block(m, n, threads), chunk = round_up(std::min(k, kMaxChunk), 32), left = 0;
  if (product != Product::kTransposed && k > kLongChunk) chunk = kLongChunk;
  if (product == Product::kTransposed) {
    // Rows are split in two blocks where the result is narrow and k short.
    if (k <= kMaxChunk && n < 1024) rows = std::min<int64_t>(rows, kMaxRows / 2);
    left = rows * (k > kMaxChunk ? chunk + 16 : chunk) * 2;
  }
  return threads * (kColumns * chunk * 2 + rows * columns * 4 + left + 640) +
         (product == Product::kPlain ? 384 : 512);
}

int64_t f32_bytes(Product product, int64_t m, int64_t n, int64_t k, int64_t threads) {
  if (m < kMaxRows || k < 256) return 0;  // oneDNN reads the operands in place
  if (product == Product::kPlain) return 640 * threads + 128;
  if (product == Product::kAffine) {
    const int64_t chunk = k > kLongChunk ? kLongChunk : std::min(k, kMaxChunk);
    return threads * (kColumns * chunk * 4 + 640) + 384;
  }
  const int64_t rows = k < kMaxChunk && n >= 1024 ? kMaxRows : kMaxRows / 2;
  const int64_t chunk = k < kMaxChunk ? k : kMaxChunk + 16;
  return threads * (rows * chunk * 4 + 640) + 256;
}

}  // namespace

int64_t product_scratch_bytes(Product product, at::ScalarType dtype, int64_t m, int64_t n, int64_t k) {
  if (!chosen_avx512() || m == 0 || n == 0 || k == 0) return 0;
  const int64_t threads = at::get_num_threads();
  if (dtype == at::kBFloat16) return bf16_bytes(product, m, n, k, threads);
  return dtype == at::kFloat ? f32_bytes(product, m, n, k, threads) : 0;
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
  if (!is_onednns(size)) return patches_bytes(size);
  const int64_t block = chosen_avx512() ? kBlock : kAvx2Block;
  return thread_bytes() + element_bytes(size) * weight_elements(size, round_up(size.out_channels, block),
                                                                inner_channels(size, size.in_channels));
}

int64_t convolution_grad_x_scratch_bytes(const ConvolutionSize& size) {
  if (!is_onednns(size)) return patches_bytes(size);
  const int64_t block = chosen_avx512() ? kBlock : kAvx2Block;
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
