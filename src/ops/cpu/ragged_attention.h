// Attention of one head of one sample against rows of its own number, in plain pointers.
#pragma once
#include <cstddef>

#include "core/dtype.h"
#include "ops/cpu/head_tokens.h"

namespace kiln::ops::cpu {

inline constexpr size_t kRaggedQueries = 64;  // of a block: calls that begin elsewhere split one

struct RaggedHead {
  Dtype dtype;  // of all tokens and rows
  size_t head_dim, num_queries, num_rows;
  float scale;
  HeadTokens q;     // (num_queries, head_dim)
  HeadTokens k, v;  // (num_rows, head_dim)
};

// Floats of 64-byte aligned scratch for heads of at most `num_rows` rows.
size_t ragged_attention_scratch(size_t head_dim, size_t num_rows);
size_t ragged_attention_grad_scratch(size_t head_dim, size_t num_rows);

// out (num_queries, head_dim); zero where there are no rows.
void ragged_attention(const RaggedHead& head, HeadTokens out, float* scratch);

// grad_q like q. grad_k and grad_v (num_rows, head_dim), of `sum_dtype`, are sums over these queries.
void ragged_attention_grad(const RaggedHead& head, HeadTokens grad, HeadTokens grad_q, HeadTokens grad_k,
                           HeadTokens grad_v, Dtype sum_dtype, float* scratch);

}  // namespace kiln::ops::cpu
