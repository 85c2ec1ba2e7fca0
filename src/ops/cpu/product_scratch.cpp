// Measured with the oneDNN of torch 2.11 on AVX-512 processors, one to eight threads, m, n and k from 1 to
// 8192, by watching the allocator. Each thread packs panels of its operands: a chunk of k by 64 columns of
// the right one, its rows of a transposed left one, and sums up its rows of the result in f32 where the
// operands are bf16. Which blocks oneDNN takes depends on the processor's caches; a block taken otherwise is
// off by less than half a MiB per thread.
#include "ops/cpu/product_scratch.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "ops/cpu/instruction_set.h"

namespace kiln::ops::cpu {
namespace {

constexpr int64_t kColumns = 64, kMaxRows = 256, kMaxChunk = 512, kLongChunk = 1024;

int64_t round_up(int64_t value, int64_t multiple) { return at::divup(value, multiple) * multiple; }

// Rows of the result that a thread takes at a time: at most 256, and fewer where the blocks would not divide
// evenly.
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
    // Two blocks of rows where the result is narrow and k short.
    if (k <= kMaxChunk && n < 1024) rows = std::min<int64_t>(rows, kMaxRows / 2);
    left = rows * (k > kMaxChunk ? chunk + 16 : chunk) * 2;
  }
  return threads * (kColumns * chunk * 2 + rows * columns * 4 + left + 640) +
         (product == Product::kPlain ? 384 : 512);
}

int64_t f32_bytes(Product product, int64_t m, int64_t n, int64_t k, int64_t threads) {
  if (m < kMaxRows || k < 256) return 0;  // operands are read in place
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

}  // namespace kiln::ops::cpu
