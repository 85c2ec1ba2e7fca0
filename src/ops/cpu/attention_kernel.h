// SIMD attention of one head, torch-free. The tokens of a head are rows of `head_dim` elements, `*_stride`
// elements apart, so that a packed projection is read and its gradient written in place.
#pragma once
#include <cstddef>
#include <cstdint>

// 1 if the compiler can build the kernels.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KILN_AVX512_ATTENTION 1
#else
#define KILN_AVX512_ATTENTION 0
#endif

namespace kiln::ops::cpu {

enum class AttentionType { kF32, kBF16 };

struct AttentionForward {
  const void *q, *k, *v;  // (num_tokens, head_dim)
  int64_t qkv_stride;
  void* out;  // (num_tokens, head_dim)
  int64_t out_stride;
  float* log2_sum;  // (num_tokens): log2 of the sum of exp(scale * q k^T) over the keys
  int64_t num_tokens, head_dim;
  float scale;
};

struct AttentionBackward {
  const void *q, *k, *v;
  int64_t qkv_stride;
  const void *out, *grad_out;
  int64_t out_stride;
  const float* log2_sum;
  void *grad_q, *grad_k, *grad_v;  // laid out like q, k, v
  int64_t num_tokens, head_dim;
  float scale;
};

// Two sets of kernels: for AVX-512, with bf16 multiplied as pairs (where the processor does that, and
// head_dim is even), and for vectors of any width, which compute in f32. The scratch of one call is in bytes,
// 64-byte aligned. Rows [row_begin, row_end) of the output do not depend on how they are split.
std::size_t avx512_forward_scratch(AttentionType type, int64_t num_tokens, int64_t head_dim);
std::size_t avx512_backward_scratch(AttentionType type, int64_t num_tokens, int64_t head_dim);
void avx512_forward_head(AttentionType type, const AttentionForward& args, int64_t row_begin, int64_t row_end,
                         void* scratch);
void avx512_backward_head(AttentionType type, const AttentionBackward& args, void* scratch);

inline constexpr int64_t kVectorQueries = 96, kVectorKeys = 192;  // of a block of scores
std::size_t vector_forward_scratch(AttentionType type, int64_t num_tokens, int64_t head_dim);
std::size_t vector_backward_scratch(AttentionType type, int64_t num_tokens, int64_t head_dim);
void vector_forward_head(AttentionType type, const AttentionForward& args, int64_t row_begin, int64_t row_end,
                         void* scratch);
void vector_backward_head(AttentionType type, const AttentionBackward& args, void* scratch);

// One head in bf16 by matrix tiles (AMX): the work that the AVX-512 kernels do on other processors.

// True if this processor has tiles and the system lets the process use them.
bool has_matrix_tiles();

std::size_t tiles_forward_scratch(int64_t num_tokens, int64_t head_dim);
std::size_t tiles_backward_scratch(int64_t num_tokens, int64_t head_dim);
void tiles_forward_head(const AttentionForward& args, int64_t row_begin, int64_t row_end, void* scratch);
void tiles_backward_head(const AttentionBackward& args, void* scratch);

}  // namespace kiln::ops::cpu
