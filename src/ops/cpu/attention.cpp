// Attention on the CPU, head by head.
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

struct HeadKernels {
  decltype(vector_forward_scratch)* forward_scratch;
  decltype(vector_backward_scratch)* backward_scratch;
  decltype(vector_forward_head)* forward;
  decltype(vector_backward_head)* backward;
};

bool uses_avx512(AttentionType type, int64_t head_dim) {
  return KILN_AVX512_ATTENTION && chosen_avx512() &&
         (type == AttentionType::kF32 || (cpu_level() >= CpuLevel::kAvx512Bf16 && head_dim % 2 == 0));
}

HeadKernels kernels_of(AttentionType type, int64_t head_dim) {
#if KILN_AVX512_ATTENTION
  if (uses_avx512(type, head_dim))
    return {avx512_forward_scratch, avx512_backward_scratch, avx512_forward_head, avx512_backward_head};
#endif
  return {vector_forward_scratch, vector_backward_scratch, vector_forward_head, vector_backward_head};
}

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

void forward_heads(const at::Tensor& qkv, double scale, const at::Tensor& out, const at::Tensor& log2_sum) {
  constexpr int64_t kRows = kVectorQueries;  // whole blocks of every kernel
  const Shape shape(qkv);
  const AttentionType type = type_of(qkv);
  const HeadKernels kernels = kernels_of(type, shape.head_dim);
  const int64_t num_heads = shape.batch * shape.num_heads, blocks = at::divup(shape.num_tokens, kRows);
  // With few heads, the rows of a head are shared out too.
  constexpr int64_t kEnough = 64;  // pieces in all
  const int64_t splits = std::min(at::divup(kEnough, num_heads), blocks);
  const int64_t rows = at::divup(blocks, splits) * kRows;
  parallel_pieces(num_heads * splits, 1, [&](int64_t begin, int64_t end) {
    void* scratch = thread_scratch(kernels.forward_scratch(type, shape.num_tokens, shape.head_dim));
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
      if (row < row_end) kernels.forward(type, args, row, row_end, scratch);
    }
  });
}

void backward_heads(const at::Tensor& qkv, double scale, const at::Tensor& out, const at::Tensor& log2_sum,
                    const at::Tensor& grad_out, const at::Tensor& grad_qkv) {
  const Shape shape(qkv);
  const AttentionType type = type_of(qkv);
  const HeadKernels kernels = kernels_of(type, shape.head_dim);
  parallel_pieces(shape.batch * shape.num_heads, 1, [&](int64_t begin, int64_t end) {
    void* scratch = thread_scratch(kernels.backward_scratch(type, shape.num_tokens, shape.head_dim));
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
      kernels.backward(type, args, scratch);
    }
  });
}

}  // namespace

// Where AVX-512 does not multiply pairs of bf16, its kernel for f32 is faster than the other for bf16.
at::ScalarType attention_dtype(const at::Tensor& qkv) {
  const bool is_bf16 = qkv.scalar_type() == at::kBFloat16 &&
                       (uses_avx512(AttentionType::kBF16, qkv.size(4)) || !chosen_avx512());
  return is_bf16 ? at::kBFloat16 : at::kFloat;
}

AttentionEngine attention_engine(const at::Tensor& qkv, double) {
  return is_kernel_dtype(qkv.scalar_type()) ? AttentionEngine::kCpu : AttentionEngine::kNone;
}

AttentionResult attention(const at::Tensor& qkv_stored, double scale, AttentionEngine) {
  const at::Tensor qkv = qkv_stored.to(attention_dtype(qkv_stored));
  const Shape shape(qkv);
  const at::Tensor out = at::empty({shape.batch, shape.num_tokens, shape.width()}, qkv.options());
  const at::Tensor log2_sum =
      at::empty({shape.batch, shape.num_heads, shape.num_tokens}, qkv.options().dtype(at::kFloat));
  forward_heads(qkv, scale, out, log2_sum);
  return {out.to(qkv_stored.scalar_type()), log2_sum, {}, {}};
}

AttentionGrads attention_backward(const at::Tensor& grad_stored, const at::Tensor& qkv_stored,
                                  const AttentionResult& result, const AttentionPass& pass) {
  const at::ScalarType dtype = attention_dtype(qkv_stored);
  const at::Tensor qkv = qkv_stored.to(dtype), grad_out = grad_stored.to(dtype), out = result.out.to(dtype);
  const at::Tensor grad_qkv = at::empty_like(qkv);
  backward_heads(qkv, pass.scale, out, result.log_sum, grad_out, grad_qkv);
  return {.packed = grad_qkv.to(qkv_stored.scalar_type()), .q = {}, .k = {}, .v = {}};
}

}  // namespace kiln::ops::cpu
