#include "ops/cuda/attention_scratch.h"

#include <ATen/Parallel.h>

#include <vector>

#include "core/aten.h"

namespace kiln::ops {

void touch_flash_scratch(const at::TensorOptions& options, int64_t rows, int64_t num_heads,
                         int64_t head_dim) {
  const auto f32 = options.dtype(at::kFloat);
  const int64_t padding = head_dim <= 128 ? 32 : 64;
  const at::Tensor row_sums = at::empty({num_heads, rows}, f32);
  at::empty({rows, num_heads, at::divup(head_dim, padding) * padding}, f32);
}

void touch_efficient_scratch(const at::TensorOptions& options, int64_t batch, int64_t num_tokens,
                             int64_t num_heads, int64_t head_dim) {
  const auto f32 = options.dtype(at::kFloat);
  const std::vector<int64_t> sums{batch, num_heads, num_tokens};
  at::Tensor delta;
  {
    const at::Tensor product = at::empty({batch, num_tokens, num_heads, head_dim}, f32);
    const at::Tensor sum = at::empty(sums, f32);
    delta = at::empty(sums, f32);
  }
  constexpr int64_t kColumns = 64, kLock = 4;  // of a tile; f32 that its lock takes
  const int64_t tile_rows = head_dim <= 64 ? 64 : 128;
  const int64_t tiles = at::divup(num_tokens, tile_rows) * at::divup(head_dim, kColumns);
  at::empty({batch * num_heads * tiles * (tile_rows * kColumns + kLock)}, f32);
}

}  // namespace kiln::ops
