#include "ops/cpu/attention_heads.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "core/aten.h"
#include "core/cpu_level.h"
#include "core/error.h"
#include "ops/cpu/attention_kernel.h"
#include "ops/cpu/instruction_set.h"
#include "ops/cpu/thread_scratch.h"
#include "ops/kernels.h"

namespace kiln::ops::cpu {
namespace {

AttentionType type_of(const at::Tensor& operand) {
  return operand.scalar_type() == at::kBFloat16 ? AttentionType::kBF16 : AttentionType::kF32;
}

struct HeadKernels {
  decltype(vector_forward_scratch)* forward_scratch;
  decltype(vector_backward_scratch)* backward_scratch;
  decltype(vector_forward_head)* forward;
  decltype(vector_backward_head)* backward;
};

// Keys lie across the vectors of AVX-512's kernels, so few of them leave lanes idle; the others have queries
// there.
bool has_avx512(const AttentionHeads& heads) {
  constexpr int64_t kFewKeys = 16;
  return KILN_AVX512_KERNELS && chosen_avx512() && heads.mean_keys() > kFewKeys;
}

bool uses_avx512(const AttentionHeads& heads, AttentionType type) {
  return has_avx512(heads) &&
         (type == AttentionType::kF32 || (cpu_level() >= CpuLevel::kAvx512Bf16 && heads.q.size(3) % 2 == 0));
}

HeadKernels kernels_of(const AttentionHeads& heads) {
#if KILN_AVX512_KERNELS
  if (uses_avx512(heads, type_of(heads.q)))
    return {avx512_forward_scratch, avx512_backward_scratch, avx512_forward_head, avx512_backward_head};
#endif
  return {vector_forward_scratch, vector_backward_scratch, vector_forward_head, vector_backward_head};
}

// One head's tokens.
struct Rows {
  void* data;
  int64_t stride;
};

// Returns head h from token `first` on, of tokens (T, H, d), or of sample b of (B, N, H, d).
Rows rows_from(const at::Tensor& tensor, int64_t b, int64_t first, int64_t h) {
  const int64_t token = tensor.dim() - 3, stride = tensor.stride(token);
  const int64_t element =
      (token == 1 ? b * tensor.stride(0) : 0) + first * stride + h * tensor.stride(token + 1);
  return {.data = static_cast<char*>(tensor.data_ptr()) + element * tensor.element_size(), .stride = stride};
}

void zero_rows(const Rows& rows, int64_t count, int64_t bytes, int64_t element_size) {
  for (int64_t i = 0; i < count; ++i)
    std::memset(static_cast<char*>(rows.data) + i * rows.stride * element_size, 0,
                static_cast<size_t>(bytes));
}

// Rows of a piece of queries: whole blocks of every kernel.
constexpr int64_t kQueryBlock = kVectorQueries;
int64_t rows_of_pieces(int64_t num_queries, int64_t pieces) {
  return at::divup(at::divup(num_queries, kQueryBlock), pieces) * kQueryBlock;
}

// The queries [row, row_end) of head h of sample b.
struct Piece {
  int64_t b, h, index, row, row_end;
};

// Calls body(piece) for all pieces of all heads.
template <class Body>
void for_each_piece(const at::Tensor& q, int64_t pieces, const Body& body) {
  const int64_t num_heads = q.size(2), num_queries = q.size(1), rows = rows_of_pieces(num_queries, pieces);
  kLoop.on(q)(q.size(0) * num_heads * pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / pieces, index = i % pieces, row = index * rows;
      body(Piece{.b = head / num_heads,
                 .h = head % num_heads,
                 .index = index,
                 .row = row,
                 .row_end = std::min(num_queries, row + rows)});
    }
  });
}

int64_t most_keys(const AttentionHeads& heads) {
  int64_t most = 0;
  for (int64_t b = 0; b < heads.q.size(0); ++b) most = std::max(most, heads.num_keys(b));
  return most;
}

}  // namespace

// Where AVX-512 does not multiply pairs of bf16, its kernel for f32 is faster than the other for bf16.
at::ScalarType computing_dtype(const AttentionHeads& heads) {
  const bool is_bf16 = heads.q.scalar_type() == at::kBFloat16 &&
                       (uses_avx512(heads, AttentionType::kBF16) || !has_avx512(heads));
  return is_bf16 ? at::kBFloat16 : at::kFloat;
}

bool serves_mask(const AttentionHeads& heads) { return uses_avx512(heads, type_of(heads.q)); }

void attend(const AttentionHeads& heads, const at::Tensor& out, const at::Tensor& log2_sum) {
  const at::Tensor& q = heads.q;
  const AttentionType type = type_of(q);
  const HeadKernels kernels = kernels_of(heads);
  const int64_t num_queries = q.size(1), head_dim = q.size(3), most = most_keys(heads);
  constexpr int64_t kEnough = 64;  // pieces in all: with few heads, the queries of a head are shared out too
  const int64_t splits =
      std::min(at::divup(kEnough, q.size(0) * q.size(2)), at::divup(num_queries, kQueryBlock));
  for_each_piece(q, splits, [&](const Piece& piece) {
    if (piece.row >= piece.row_end) return;
    const auto [b, h, index, row, row_end] = piece;
    const int64_t first = heads.first_key(b), num_keys = heads.num_keys(b);
    const Rows queries = rows_from(q, b, 0, h), keys = rows_from(heads.k, b, first, h),
               values = rows_from(heads.v, b, first, h), to = rows_from(out, b, 0, h);
    float* sums = log2_sum.data_ptr<float>() + (b * q.size(2) + h) * num_queries;
    if (num_keys == 0) {
      zero_rows(rows_from(out, b, row, h), row_end - row, head_dim * out.element_size(), out.element_size());
      std::fill(sums + row, sums + row_end, 0.0f);
      return;
    }
    const AttentionMask mask = heads.mask.defined()
                                   ? AttentionMask{heads.mask.const_data_ptr<float>() +
                                                       b * heads.mask.stride(0) + h * heads.mask.stride(1),
                                                   heads.mask.stride(2)}
                                   : AttentionMask{};
    kernels.forward(type,
                    {.q = queries.data,
                     .q_stride = queries.stride,
                     .k = keys.data,
                     .v = values.data,
                     .k_stride = keys.stride,
                     .v_stride = values.stride,
                     .out = to.data,
                     .out_stride = to.stride,
                     .log2_sum = sums,
                     .num_keys = num_keys,
                     .head_dim = head_dim,
                     .scale = static_cast<float>(heads.scale),
                     .mask = mask},
                    row, row_end,
                    thread_scratch(kernels.forward_scratch(
                        type, {.num_queries = num_queries, .num_keys = most, .head_dim = head_dim})));
  });
}

int64_t pieces_of_queries(const at::Tensor& q) {
  constexpr int64_t kEnough = 128, kLeast = 256;  // pieces in all; queries that pay for packing k and v
  const int64_t wanted =
      std::clamp<int64_t>(at::divup(kEnough, q.size(0) * q.size(2)), 1, at::divup(q.size(1), kLeast));
  return at::divup(q.size(1), rows_of_pieces(q.size(1), wanted));
}

void attend_backward(const AttentionHeads& heads, const at::Tensor& out, const at::Tensor& log2_sum,
                     const at::Tensor& grad_out, const HeadGrads& grads) {
  const at::Tensor& q = heads.q;
  const AttentionType type = type_of(q);
  const HeadKernels kernels = kernels_of(heads);
  const int64_t num_queries = q.size(1), head_dim = q.size(3), most = most_keys(heads);
  const auto sums_of = [&](const at::Tensor& grad, const Piece& piece) {
    return rows_from(grads.pieces > 1 ? grad[piece.index] : grad, piece.b, heads.first_key(piece.b), piece.h);
  };
  for_each_piece(q, grads.pieces, [&](const Piece& piece) {
    const auto [b, h, index, row, row_end] = piece;
    const int64_t first = heads.first_key(b), num_keys = heads.num_keys(b), count = row_end - row,
                  element_size = q.element_size();
    const Rows to_q = rows_from(grads.q, b, row, h);
    if (num_keys == 0) return zero_rows(to_q, count, head_dim * element_size, element_size);
    const Rows queries = rows_from(q, b, row, h), keys = rows_from(heads.k, b, first, h),
               values = rows_from(heads.v, b, first, h), to_k = sums_of(grads.k, piece),
               to_v = sums_of(grads.v, piece);
    kernels.backward(type,
                     {.q = queries.data,
                      .q_stride = queries.stride,
                      .k = keys.data,
                      .v = values.data,
                      .k_stride = keys.stride,
                      .v_stride = values.stride,
                      .out = rows_from(out, b, row, h).data,
                      .grad_out = rows_from(grad_out, b, row, h).data,
                      .out_stride = out.stride(1),
                      .log2_sum = log2_sum.const_data_ptr<float>() + (b * q.size(2) + h) * num_queries + row,
                      .grad_q = to_q.data,
                      .grad_q_stride = to_q.stride,
                      .grad_k = to_k.data,
                      .grad_v = to_v.data,
                      .grad_kv_stride = to_k.stride,
                      .sum_type = type_of(grads.k),
                      .num_queries = count,
                      .num_keys = num_keys,
                      .head_dim = head_dim,
                      .scale = static_cast<float>(heads.scale)},
                     thread_scratch(kernels.backward_scratch(
                         type, {.num_queries = count, .num_keys = most, .head_dim = head_dim})));
  });
}

}  // namespace kiln::ops::cpu
