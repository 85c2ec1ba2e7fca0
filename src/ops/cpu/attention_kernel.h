// SIMD attention of one head of one sample, torch-free: its queries against its keys, of which there may be
// any other number. The tokens of a head are rows of `head_dim` elements, `*_stride` elements apart, so that
// a packed projection is read and its gradient written in place.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kiln::ops::cpu {

enum class AttentionType { kF32, kBF16 };

// Added to scaled scores: (num_queries, num_keys), or nothing.
struct AttentionMask {
  const float* values = nullptr;
  int64_t stride = 0;
};

struct AttentionForward {
  const void* q;  // (num_queries, head_dim)
  int64_t q_stride;
  const void *k, *v;  // (num_keys, head_dim)
  int64_t k_stride, v_stride;
  void* out;  // like q
  int64_t out_stride;
  float* log2_sum;             // (num_queries): log2 of the sum of exp(scale * q k^T) over the keys
  int64_t num_keys, head_dim;  // at least 1
  float scale;
  AttentionMask mask{};  // AVX-512's kernels alone take one
};

struct AttentionBackward {
  const void* q;
  int64_t q_stride;
  const void *k, *v;
  int64_t k_stride, v_stride;
  const void *out, *grad_out;
  int64_t out_stride;
  const float* log2_sum;
  void* grad_q;  // like q
  int64_t grad_q_stride;
  void *grad_k, *grad_v;  // like k and v, of `sum_type`: sums over these queries
  int64_t grad_kv_stride;
  AttentionType sum_type;
  int64_t num_queries, num_keys, head_dim;
  float scale;
};

// The numbers that scratch depends on.
struct AttentionSizes {
  int64_t num_queries, num_keys, head_dim;
};

// Two sets of kernels: for AVX-512, with bf16 multiplied as pairs (where the processor does that, and
// head_dim is even), and for vectors of any width, which compute in f32. The scratch of one call is in bytes,
// 64-byte aligned. Rows [row_begin, row_end) of the output do not depend on how they are split.
std::size_t avx512_forward_scratch(AttentionType type, const AttentionSizes& sizes);
std::size_t avx512_backward_scratch(AttentionType type, const AttentionSizes& sizes);
void avx512_forward_head(AttentionType type, const AttentionForward& args, int64_t row_begin, int64_t row_end,
                         void* scratch);
void avx512_backward_head(AttentionType type, const AttentionBackward& args, void* scratch);

inline constexpr int64_t kVectorQueries = 96, kVectorKeys = 192;  // of a block of scores
std::size_t vector_forward_scratch(AttentionType type, const AttentionSizes& sizes);
std::size_t vector_backward_scratch(AttentionType type, const AttentionSizes& sizes);
void vector_forward_head(AttentionType type, const AttentionForward& args, int64_t row_begin, int64_t row_end,
                         void* scratch);
void vector_backward_head(AttentionType type, const AttentionBackward& args, void* scratch);

// One head in bf16 by matrix tiles (AMX): the work that the AVX-512 kernels do on other processors.

std::size_t tiles_forward_scratch(const AttentionSizes& sizes);
std::size_t tiles_backward_scratch(const AttentionSizes& sizes);
void tiles_forward_head(const AttentionForward& args, int64_t row_begin, int64_t row_end, void* scratch);
void tiles_backward_head(const AttentionBackward& args, void* scratch);

}  // namespace kiln::ops::cpu
