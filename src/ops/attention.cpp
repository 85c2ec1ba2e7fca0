#include "ops/attention.h"

#include <ATen/Parallel.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <vector>

#include "core/aten.h"
#include "core/error.h"
#include "core/scratch.h"
#include "ops/cpu/attention_kernel.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

// Returns the dtype that the engines compute in. On a CPU fp16 is storage only, and so is bf16 without bf16
// instructions.
at::ScalarType engine_dtype(const at::Tensor& qkv) {
  const bool storage_only =
      qkv.scalar_type() == at::kHalf || (qkv.scalar_type() == at::kBFloat16 &&
                                         !cpu::attention_supported(cpu::AttentionType::kBF16, qkv.size(4)));
  return computes_on_cpu(qkv) && storage_only ? at::kFloat : qkv.scalar_type();
}

// Allocates what the engines allocate and computes nothing.
AttentionResult meta_attention(const at::Tensor& stored) {
  const at::Tensor qkv = stored.to(engine_dtype(stored));
  const int64_t batch = qkv.size(0), num_tokens = qkv.size(1), num_heads = qkv.size(3),
                head_dim = qkv.size(4);
  const at::Tensor out = at::empty({batch, num_tokens, num_heads * head_dim}, qkv.options());
  const at::Tensor log_sum = at::empty({batch, num_heads, num_tokens}, qkv.options().dtype(at::kFloat));
  return {out.to(stored.scalar_type()), log_sum, {}, {}};
}

void touch_cuda_scratch(const at::Tensor& qkv) {
  const int64_t batch = qkv.size(0), num_tokens = qkv.size(1), num_heads = qkv.size(3),
                head_dim = qkv.size(4);
  if (qkv.scalar_type() == at::kFloat)
    touch_efficient_scratch(qkv.options(), batch, num_tokens, num_heads, head_dim);
  else
    touch_flash_scratch(qkv.options(), batch * at::divup(num_tokens, kFlashRows) * kFlashRows, num_heads,
                        head_dim);
}

at::Tensor meta_attention_backward(const at::Tensor& grad_stored, const at::Tensor& stored,
                                   const AttentionResult& result) {
  if (computes_on_cuda(stored)) {
    const at::Tensor grads = at::empty_like(stored);  // the gradients of q, k and v, before they are packed
    touch_cuda_scratch(stored);
    return at::empty_like(stored);
  }
  const at::ScalarType dtype = engine_dtype(stored);
  const at::Tensor qkv = stored.to(dtype), grad_out = grad_stored.to(dtype), out = result.out.to(dtype);
  return at::empty_like(qkv).to(stored.scalar_type());
}

AttentionEngine engine_for(const at::Tensor& qkv, double scale) {
  if (qkv.numel() == 0) return AttentionEngine::kNone;
  if (qkv.is_cuda()) return cuda::attention_engine(qkv, scale);
  const bool is_served =
      qkv.is_meta() ? qkv.scalar_type() != at::kDouble : qkv.is_cpu() && cpu::attention_serves(qkv);
  return is_served ? AttentionEngine::kCpu : AttentionEngine::kNone;
}

// On meta, ATen's scaled_dot_product_attention takes its composed path, which ends here.
at::Tensor safe_softmax_on_meta(const at::Tensor& input, int64_t, std::optional<at::ScalarType> dtype) {
  return at::empty_like(input, input.options().dtype(dtype.value_or(input.scalar_type())));
}

TORCH_LIBRARY_IMPL(aten, Meta, library) { library.impl("_safe_softmax", safe_softmax_on_meta); }

// Saves the packed projection, the output and the softmax sums: O(N), never the (N, N) probabilities.
struct PackedAttention : torch::autograd::Function<PackedAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& qkv, double scale,
                            AttentionEngine engine) {
    const ScratchScope scope(Scratch::kAttention);
    OpMark mark("kiln::packed_attention", qkv);
    const AttentionResult result = qkv.is_meta()   ? meta_attention(qkv)
                                   : qkv.is_cuda() ? cuda::attention(qkv, scale, engine)
                                                   : cpu::attention(qkv, scale);
    ctx->save_for_backward({qkv, result.out, result.log_sum, result.seed, result.offset});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["engine"] = static_cast<int64_t>(engine);
    mark.outputs(result.out, result.log_sum);
    return result.out;
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& qkv = saved[0];
    const AttentionResult result{saved[1], saved[2], saved[3], saved[4]};
    const double scale = ctx->saved_data["scale"].toDouble();
    const auto engine = static_cast<AttentionEngine>(ctx->saved_data["engine"].toInt());
    const ScratchScope scope(Scratch::kAttention);
    OpMark mark("kiln::packed_attention_backward", grads[0], qkv, result.out, result.log_sum);
    const at::Tensor grad_out = grads[0].contiguous();
    const at::Tensor grad_qkv = qkv.is_meta() ? meta_attention_backward(grad_out, qkv, result)
                                : qkv.is_cuda()
                                    ? cuda::attention_backward(grad_out, qkv, result, scale, engine)
                                    : cpu::attention_backward(grad_out, qkv, result, scale);
    mark.outputs(grad_qkv);
    return {grad_qkv, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

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
  constexpr int64_t kColumns = 64, kLock = 4;  // columns of a tile; f32 elements of its lock
  const int64_t tile_rows = head_dim <= 64 ? 64 : 128;
  const int64_t tiles = at::divup(num_tokens, tile_rows) * at::divup(head_dim, kColumns);
  at::empty({batch * num_heads * tiles * (tile_rows * kColumns + kLock)}, f32);
}

namespace reference {

at::Tensor packed_attention(const at::Tensor& qkv, double scale) {
  const at::ScalarType dtype = qkv.scalar_type();
  const at::Tensor packed = qkv.to(product_dtype(qkv.device(), dtype));
  const at::Tensor q = attention_heads(packed, 0), k = attention_heads(packed, 1),
                   v = attention_heads(packed, 2);
  const at::Tensor scores = at::matmul(q, k.transpose(-2, -1)) * scale;  // (B, H, N, N)
  const at::Tensor weights = at::softmax(scores, -1, dtype == at::kDouble ? at::kDouble : at::kFloat);
  return at::matmul(weights.to(packed.scalar_type()), v).transpose(1, 2).flatten(2).to(dtype);
}

}  // namespace reference

at::Tensor packed_attention(const at::Tensor& qkv, double scale) {
  if (qkv.dim() != 5 || qkv.size(2) != 3 || !qkv.is_floating_point())
    fail("packed_attention", "expected floating qkv (B, N, 3, H, d), got {} {}",
         c10::toString(qkv.scalar_type()), fmt::join(qkv.sizes(), "x"));
  const at::Tensor packed = qkv.contiguous();
  const AttentionEngine engine = engine_for(packed, scale);
  return engine == AttentionEngine::kNone ? reference::packed_attention(packed, scale)
                                          : PackedAttention::apply(packed, scale, engine);
}

}  // namespace kiln::ops
