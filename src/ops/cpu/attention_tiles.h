// Attention of one head in bf16 by matrix tiles (AMX), torch-free. What the AVX-512 kernels do on other
// processors.
#pragma once
#include "ops/cpu/attention_kernel.h"

namespace kiln::ops::cpu {

// Whether this processor has tiles and the system lets the process use them.
bool has_matrix_tiles();

std::size_t tiles_forward_scratch(int64_t num_tokens, int64_t head_dim);
std::size_t tiles_backward_scratch(int64_t num_tokens, int64_t head_dim);
void tiles_forward_head(const AttentionForward& args, int64_t row_begin, int64_t row_end, void* scratch);
void tiles_backward_head(const AttentionBackward& args, void* scratch);

}  // namespace kiln::ops::cpu
