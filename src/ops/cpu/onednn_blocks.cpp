#include "ops/cpu/onednn_blocks.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>

namespace kiln::ops::cpu {
namespace {

constexpr int64_t kColumns = 64, kMostRows = 256, kFewRows = 32, kFewestRows = 16, kMostColumnBlocks = 16;
constexpr int64_t kChunk = 512, kLongChunk = 1024;

bool is_power_of_two(int64_t value) { return std::has_single_bit(static_cast<uint64_t>(value)); }

// The share of a round of blocks that is missing or left over. As oneDNN's in f32: ties are decided so.
float uneven_share(int64_t work, int64_t round) {
  const int64_t rest = work % round, uneven = work < round ? round - rest : std::min(round - rest, rest);
  return static_cast<float>(uneven) / static_cast<float>(round);
}

int64_t smallest_factor(int64_t value) {
  for (int64_t factor = 2; factor < value; ++factor)
    if (value % factor == 0) return factor;
  return value;
}

int64_t largest_factor(int64_t value, int64_t most) {
  int64_t part = most;
  while (value % part != 0) --part;
  return part;
}

// Threads along k that are tried, from the most to the fewest.
struct AlongK {
  int64_t most = 1, fewest = 1;
};

AlongK threads_along_k(const ProductSize& size, int64_t threads, int64_t blocks, int64_t chunk) {
  AlongK tried;
  if (size.is_left_transposed && size.k >= 2048 && (!size.is_bf16 || is_power_of_two(size.k)))
    tried.most = std::min<int64_t>(threads, 4);
  if (size.is_bf16 || size.k < 20000 || size.m > 512 || size.n > 512) return tried;
  int64_t along_blocks = largest_factor(blocks, threads), along_k = threads / along_blocks;
  for (int64_t idle = threads % along_blocks; along_k <= idle; idle = threads % along_blocks) {
    along_blocks /= smallest_factor(along_blocks);
    along_k = std::max<int64_t>(threads / along_blocks, 1);
  }
  while (along_k > 1 && at::divup(size.k, chunk) <= 5 * along_k) along_k /= smallest_factor(along_k);
  return {.most = along_k, .fewest = along_k};
}

float unevenness(const ProductSize& size, const ProductBlocks& blocks, int64_t threads) {
  const int64_t num_rows = at::divup(size.m, blocks.rows), num_columns = at::divup(size.n, blocks.columns),
                parts = at::divup(num_columns, blocks.column_blocks),
                along_blocks = threads / blocks.threads_along_k,
                idle = threads - along_blocks * blocks.threads_along_k;
  const auto share = [](int64_t part, int64_t whole) {
    return static_cast<float>(part) / static_cast<float>(whole);
  };
  return (uneven_share(num_rows * parts, along_blocks) + share(blocks.rows * num_rows % size.m, size.m) +
          share(parts * blocks.column_blocks - num_columns, num_columns) + share(idle, threads) +
          uneven_share(size.k, blocks.threads_along_k * blocks.chunk)) /
         5;
}

}  // namespace

ProductBlocks product_blocks(const ProductSize& size, int64_t threads) {
  ProductBlocks tried{
      .columns = std::min(size.n, kColumns),
      .chunk = std::min(size.k, size.k > kLongChunk && !size.is_left_transposed ? kLongChunk : kChunk)};
  const int64_t num_columns = at::divup(size.n, tried.columns), most_rows = std::min(size.m, kMostRows),
                num_blocks = num_columns * at::divup(size.m, most_rows);
  const bool has_few_columns = threads > num_columns;
  const AlongK along_k = has_few_columns ? threads_along_k(size, threads, num_blocks, tried.chunk) : AlongK();
  int64_t fewest_rows = std::min(size.m, has_few_columns ? kFewestRows : kFewRows);
  if (!size.is_bf16 && size.n >= 20000 && num_blocks > 10 * threads && size.m % most_rows == 0 &&
      along_k.most == 1)
    fewest_rows = most_rows;

  float least = 1;
  ProductBlocks best = tried;
  const auto consider = [&] {
    const float uneven = unevenness(size, tried, threads);
    if (uneven >= least) return false;
    least = uneven;
    best = tried;
    return true;
  };
  for (tried.threads_along_k = along_k.most; tried.threads_along_k >= along_k.fewest;
       --tried.threads_along_k) {
    bool is_found = false;
    const int64_t along_blocks = threads / tried.threads_along_k;
    for (tried.column_blocks = std::min(size.copies_left ? kMostColumnBlocks : 1, num_columns);
         tried.column_blocks >= 1 && least > 0; --tried.column_blocks) {
      for (tried.rows = most_rows; tried.rows >= fewest_rows && least > 0; --tried.rows) {
        const int64_t work = at::divup(size.m, tried.rows) * at::divup(num_columns, tried.column_blocks);
        const bool leaves_threads_idle = work < 3 * along_blocks && work % along_blocks != 0;
        if (!leaves_threads_idle || along_k.most > 1) is_found |= consider();
      }
    }
    if (is_found) continue;
    tried.rows = fewest_rows;
    tried.column_blocks = 1;
    consider();
  }
  return best;
}

}  // namespace kiln::ops::cpu
