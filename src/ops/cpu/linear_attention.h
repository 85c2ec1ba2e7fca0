// Linear attention of one head with ReLU features, in plain pointers.
#pragma once
#include <cstddef>

#include "core/dtype.h"
#include "ops/cpu/head_tokens.h"

namespace kiln::ops::cpu {

struct LinearAttentionShape {
  Dtype dtype;  // of all tokens
  size_t num_tokens, head_dim;
};

void linear_attention(const LinearAttentionShape& shape, HeadTokens q, HeadTokens k, HeadTokens v,
                      HeadTokens out);

void linear_attention_grad(const LinearAttentionShape& shape, HeadTokens q, HeadTokens k, HeadTokens v,
                           HeadTokens grad, HeadTokens grad_q, HeadTokens grad_k, HeadTokens grad_v);

}  // namespace kiln::ops::cpu
