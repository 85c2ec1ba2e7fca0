// Dry runs on CUDA: what backward of ATen's attention kernels takes for itself, from its source, not
// measured.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace kiln::ops {

inline constexpr int64_t kFlashRows = 128;  // to which flash attention pads a sample's tokens

// Flash attention sums the gradient of q in f32, its head dimension padded, beside a sum for each row
// (mha_bwd and mha_varlen_bwd, csrc/flash_attn). `rows`: of all samples, with their padding.
void touch_flash_scratch(const at::TensorOptions& options, int64_t rows, int64_t num_heads, int64_t head_dim);

// The memory-efficient kernels in f32 first multiply out and its gradient, then sum the gradient of q in
// tiles (_efficient_attention_backward; workspace_elements_gq, mem_eff_attention/kernel_backward.h).
void touch_efficient_scratch(const at::TensorOptions& options, int64_t batch, int64_t num_tokens,
                             int64_t num_heads, int64_t head_dim);

}  // namespace kiln::ops
