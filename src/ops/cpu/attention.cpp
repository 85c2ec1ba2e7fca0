// Attention on the CPU: the SIMD kernels where the processor has them, else ATen's flash attention.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "core/aten.h"
#include "core/cpu_level.h"
#include "core/error.h"
#include "core/threads/parallel_pieces.h"
#include "ops/attention.h"
#include "ops/cpu/attention_kernel.h"
#include "ops/cpu/instruction_set.h"
#include "ops/kernels.h"

namespace kiln::ops::cpu {
namespace {

struct Shape {
  int64_t batch, num_tokens, num_heads, head_dim;
  explicit Shape(const at::Tensor& qkv)
      : batch(qkv.size(0)), num_tokens(qkv.size(1)), num_heads(qkv.size(3)), head_dim(qkv.size(4)) {}
  int64_t width() const { return num_heads * head_dim; }
};

AttentionType type_of(const at::Tensor& operand) {
  return operand.scalar_type() == at::kBFloat16 ? AttentionType::kBF16 : AttentionType::kF32;
}

bool has_simd(const at::Tensor& qkv) { return attention_supported(AttentionType::kF32, qkv.size(4)); }

thread_local std::unique_ptr<void, decltype(&std::free)> scratch_memory(nullptr, std::free);
thread_local std::size_t scratch_memory_bytes = 0;

// Returns scratch of this thread, which is kept for its next call: fresh pages cost more than the work on
// small heads.
void* thread_scratch(std::size_t bytes) {
  if (scratch_memory_bytes < bytes) {
    scratch_memory.reset();
    scratch_memory.reset(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
    scratch_memory_bytes = scratch_memory ? bytes : 0;
    if (!scratch_memory)
      fail("packed_attention", "expected {} bytes of scratch, got none: out of memory", bytes);
  }
  return scratch_memory.get();
}

// Returns the address of element 0 of (batch, token 0, part, head) in a packed projection, or in the output
// if parts = 1.
void* head_of(const at::Tensor& tensor, const Shape& shape, int64_t parts, int64_t part, int64_t head) {
  const int64_t batch = head / shape.num_heads;
  const int64_t element =
      (batch * shape.num_tokens * parts + part) * shape.width() + head % shape.num_heads * shape.head_dim;
  return static_cast<char*>(tensor.data_ptr()) + element * tensor.element_size();
}

void simd_forward(const at::Tensor& qkv, double scale, const at::Tensor& out, const at::Tensor& log2_sum) {
  constexpr int64_t kRows = 96;  // whole blocks of every kernel
  const Shape shape(qkv);
  const AttentionType type = type_of(qkv);
  const int64_t num_heads = shape.batch * shape.num_heads, blocks = at::divup(shape.num_tokens, kRows);
  // With few heads, the rows of a head are shared out too.
  constexpr int64_t kEnough = 64;  // pieces in all
  const int64_t splits = std::min(at::divup(kEnough, num_heads), blocks);
  const int64_t rows = at::divup(blocks, splits) * kRows;
  parallel_pieces(num_heads * splits, 1, [&](int64_t begin, int64_t end) {
    void* scratch = thread_scratch(attention_forward_scratch(type, shape.num_tokens, shape.head_dim));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / splits, row = i % splits * rows;
      const AttentionForward args{.q = head_of(qkv, shape, 3, 0, head),
                                  .k = head_of(qkv, shape, 3, 1, head),
                                  .v = head_of(qkv, shape, 3, 2, head),
                                  .qkv_stride = 3 * shape.width(),
                                  .out = head_of(out, shape, 1, 0, head),
                                  .out_stride = shape.width(),
                                  .log2_sum = log2_sum.data_ptr<float>() + head * shape.num_tokens,
                                  .num_tokens = shape.num_tokens,
                                  .head_dim = shape.head_dim,
                                  .scale = static_cast<float>(scale)};
      const int64_t row_end = std::min(shape.num_tokens, row + rows);
      if (row < row_end) attention_forward_head(type, args, row, row_end, scratch);
    }
  });
}

void simd_backward(const at::Tensor& qkv, double scale, const at::Tensor& out, const at::Tensor& log2_sum,
                   const at::Tensor& grad_out, const at::Tensor& grad_qkv) {
  const Shape shape(qkv);
  const AttentionType type = type_of(qkv);
  parallel_pieces(shape.batch * shape.num_heads, 1, [&](int64_t begin, int64_t end) {
    void* scratch = thread_scratch(attention_backward_scratch(type, shape.num_tokens, shape.head_dim));
    for (int64_t head = begin; head < end; ++head) {
      const AttentionBackward args{.q = head_of(qkv, shape, 3, 0, head),
                                   .k = head_of(qkv, shape, 3, 1, head),
                                   .v = head_of(qkv, shape, 3, 2, head),
                                   .qkv_stride = 3 * shape.width(),
                                   .out = head_of(out, shape, 1, 0, head),
                                   .grad_out = head_of(grad_out, shape, 1, 0, head),
                                   .out_stride = shape.width(),
                                   .log2_sum = log2_sum.data_ptr<float>() + head * shape.num_tokens,
                                   .grad_q = head_of(grad_qkv, shape, 3, 0, head),
                                   .grad_k = head_of(grad_qkv, shape, 3, 1, head),
                                   .grad_v = head_of(grad_qkv, shape, 3, 2, head),
                                   .num_tokens = shape.num_tokens,
                                   .head_dim = shape.head_dim,
                                   .scale = static_cast<float>(scale)};
      attention_backward_head(type, args, scratch);
    }
  });
}

}  // namespace

#if KILN_AVX512_ATTENTION
bool attention_supported(AttentionType type, int64_t head_dim) {
  const bool has_bf16 = cpu_level() >= CpuLevel::kAvx512Bf16;
  return chosen_avx512() && (type == AttentionType::kF32 || (has_bf16 && head_dim % 2 == 0));
}
#else
bool attention_supported(AttentionType, int64_t) { return false; }
#endif

at::ScalarType attention_dtype(const at::Tensor& qkv) {
  const bool is_bf16 =
      qkv.scalar_type() == at::kBFloat16 && attention_supported(AttentionType::kBF16, qkv.size(4));
  return is_bf16 ? at::kBFloat16 : at::kFloat;
}

AttentionEngine attention_engine(const at::Tensor& qkv, double) {
  return is_kernel_dtype(qkv.scalar_type()) ? AttentionEngine::kCpu : AttentionEngine::kNone;
}

AttentionResult attention(const at::Tensor& qkv_stored, double scale, AttentionEngine) {
  const at::Tensor qkv = qkv_stored.to(attention_dtype(qkv_stored));
  const Shape shape(qkv);
  if (!has_simd(qkv)) {
    auto [out, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
        attention_heads(qkv, 0), attention_heads(qkv, 1), attention_heads(qkv, 2), 0.0, false, {}, scale);
    return {out.transpose(1, 2).flatten(2).to(qkv_stored.scalar_type()).contiguous(), log_sum, {}, {}};
  }
  const at::Tensor out = at::empty({shape.batch, shape.num_tokens, shape.width()}, qkv.options());
  const at::Tensor log2_sum =
      at::empty({shape.batch, shape.num_heads, shape.num_tokens}, qkv.options().dtype(at::kFloat));
  simd_forward(qkv, scale, out, log2_sum);
  return {out.to(qkv_stored.scalar_type()), log2_sum, {}, {}};
}

AttentionGrads attention_backward(const at::Tensor& grad_stored, const at::Tensor& qkv_stored,
                                  const AttentionResult& result, const AttentionPass& pass) {
  const at::ScalarType dtype = attention_dtype(qkv_stored);
  const at::Tensor qkv = qkv_stored.to(dtype), grad_out = grad_stored.to(dtype), out = result.out.to(dtype);
  const at::Tensor grad_qkv = at::empty_like(qkv);
  if (has_simd(qkv)) {
    simd_backward(qkv, pass.scale, out, result.log_sum, grad_out, grad_qkv);
  } else {
    const Shape shape(qkv);
    const auto heads = [&](const at::Tensor& tokens) {
      return tokens.view({shape.batch, shape.num_tokens, shape.num_heads, shape.head_dim}).transpose(1, 2);
    };
    const auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        heads(grad_out), attention_heads(qkv, 0), attention_heads(qkv, 1), attention_heads(qkv, 2),
        heads(out), result.log_sum, 0.0, false, {}, pass.scale);
    attention_heads(grad_qkv, 0).copy_(grad_q);
    attention_heads(grad_qkv, 1).copy_(grad_k);
    attention_heads(grad_qkv, 2).copy_(grad_v);
  }
  return {.packed = grad_qkv.to(qkv_stored.scalar_type()), .q = {}, .k = {}, .v = {}};
}

}  // namespace kiln::ops::cpu
