// How oneDNN divides a matrix product among blocks and threads on processors with AVX-512 and without AMX.
#pragma once
#include <cstdint>

namespace kiln::ops::cpu {

struct ProductSize {
  int64_t m = 0, n = 0, k = 0;  // an (m, n) result, inner products over k
  bool is_left_transposed = false;
  bool copies_left = false;  // each thread copies its rows of the left operand
  bool is_bf16 = false;      // else f32
};

struct ProductBlocks {
  int64_t rows = 1;           // of the result that a thread takes at a time
  int64_t columns = 1;        // of a block of the result
  int64_t column_blocks = 1;  // that a thread takes together
  int64_t chunk = 1;          // of k
  int64_t threads_along_k = 1;
};

// Returns the blocks that oneDNN 3.10 takes (torch 2.11): the most evenly divided work of those that it
// tries. Source: matmul/brgemm_matmul_utils.cpp of its x64 part; compared with the allocator for 1000
// products in f32 and bf16 on 1 to 16 threads.
ProductBlocks product_blocks(const ProductSize& size, int64_t threads);

}  // namespace kiln::ops::cpu
