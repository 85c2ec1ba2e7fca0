#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <fmt/ranges.h>

#include <cstdlib>
#include <memory>

#include "core/error.h"
#include "ops/cpu/attention_kernel.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

// qkv (B, N, 3, H, d) as q, k or v (B, H, N, d), a view.
at::Tensor heads(const at::Tensor& packed, int64_t which) { return packed.select(2, which).transpose(1, 2); }

void check(const at::Tensor& qkv) {
  if (qkv.dim() != 5 || qkv.size(2) != 3 || !qkv.is_floating_point())
    fail("packed_attention", "expected qkv (B, N, 3, H, d) floating, got {} {}", fmt::join(qkv.sizes(), "x"),
         c10::toString(qkv.scalar_type()));
}

// Scratch of this thread, kept for the next call.
void* thread_scratch(std::size_t bytes) {
  struct Buffer {
    void* data = nullptr;
    std::size_t bytes = 0;
    ~Buffer() { std::free(data); }
  };
  thread_local Buffer buffer;
  if (buffer.bytes < bytes) {
    std::free(buffer.data);
    buffer.data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    buffer.bytes = buffer.data ? bytes : 0;
    if (!buffer.data)
      fail("packed_attention", "expected {} bytes of scratch, got none: out of memory", bytes);
  }
  return buffer.data;
}

template <class T>
T* offset(const at::Tensor& tensor, int64_t elements) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + elements * tensor.element_size());
}

// The SIMD kernels: what they cannot take, ATen does.
struct Simd {
  cpu::AttentionType type;
  static std::optional<Simd> choose(const at::Tensor& qkv) {
    if (!qkv.device().is_cpu() || qkv.numel() == 0) return std::nullopt;
    if (qkv.scalar_type() != at::kFloat && qkv.scalar_type() != at::kBFloat16) return std::nullopt;
    const auto type = qkv.scalar_type() == at::kFloat ? cpu::AttentionType::kF32 : cpu::AttentionType::kBF16;
    if (!cpu::attention_supported(type, qkv.size(4))) return std::nullopt;
    return Simd{type};
  }

  void forward(const at::Tensor& qkv, double scale, at::Tensor& out, at::Tensor& log2_sum) const {
    const int64_t n = qkv.size(1), h = qkv.size(3), d = qkv.size(4), num_heads = qkv.size(0) * h;
    // With fewer heads than threads the rows of a head are shared out too.
    const int64_t splits =
        std::min<int64_t>((at::get_num_threads() + num_heads - 1) / num_heads, (n + 23) / 24);
    const int64_t rows = ((n + splits - 1) / splits + 23) / 24 * 24;
    at::parallel_for(0, num_heads * splits, 1, [&](int64_t begin, int64_t end) {
      void* scratch = thread_scratch(cpu::attention_forward_scratch(type, n, d));
      for (int64_t i = begin; i < end; ++i) {
        const int64_t b = i / splits / h, head = i / splits % h, row = i % splits * rows;
        if (row >= n) continue;
        const int64_t q = b * n * 3 * h * d + head * d;
        const cpu::AttentionForward args{offset<void>(qkv, q),
                                         offset<void>(qkv, q + h * d),
                                         offset<void>(qkv, q + 2 * h * d),
                                         3 * h * d,
                                         offset<void>(out, b * n * h * d + head * d),
                                         h * d,
                                         offset<float>(log2_sum, (b * h + head) * n),
                                         n,
                                         d,
                                         static_cast<float>(scale)};
        cpu::attention_forward_head(type, args, row, std::min(n, row + rows), scratch);
      }
    });
  }

  void backward(const at::Tensor& qkv, double scale, const at::Tensor& out, const at::Tensor& log2_sum,
                const at::Tensor& grad_out, at::Tensor& grad_qkv) const {
    const int64_t n = qkv.size(1), h = qkv.size(3), d = qkv.size(4), num_heads = qkv.size(0) * h;
    at::parallel_for(0, num_heads, 1, [&](int64_t begin, int64_t end) {
      void* scratch = thread_scratch(cpu::attention_backward_scratch(type, n, d));
      for (int64_t i = begin; i < end; ++i) {
        const int64_t b = i / h, head = i % h, q = b * n * 3 * h * d + head * d, o = b * n * h * d + head * d;
        const cpu::AttentionBackward args{offset<void>(qkv, q),
                                          offset<void>(qkv, q + h * d),
                                          offset<void>(qkv, q + 2 * h * d),
                                          3 * h * d,
                                          offset<void>(out, o),
                                          offset<void>(grad_out, o),
                                          h * d,
                                          offset<float>(log2_sum, i * n),
                                          offset<void>(grad_qkv, q),
                                          offset<void>(grad_qkv, q + h * d),
                                          offset<void>(grad_qkv, q + 2 * h * d),
                                          n,
                                          d,
                                          static_cast<float>(scale)};
        cpu::attention_backward_head(type, args, scratch);
      }
    });
  }
};

struct PackedAttention : torch::autograd::Function<PackedAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& qkv_in, double scale) {
    const at::Tensor qkv = qkv_in.contiguous();
    const int64_t b = qkv.size(0), n = qkv.size(1), h = qkv.size(3), d = qkv.size(4);
    at::Tensor out = at::empty({b, n, h * d}, qkv.options());
    at::Tensor log2_sum = at::empty({b, h, n}, qkv.options().dtype(at::kFloat));
    if (!qkv.is_meta()) Simd::choose(qkv)->forward(qkv, scale, out, log2_sum);
    ctx->save_for_backward({qkv, out, log2_sum});
    ctx->saved_data["scale"] = scale;
    return out;
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& qkv = saved[0];
    const double scale = ctx->saved_data["scale"].toDouble();
    at::Tensor grad_qkv = at::empty_like(qkv);
    const at::Tensor grad_out = grads[0].contiguous();
    if (!qkv.is_meta()) Simd::choose(qkv)->backward(qkv, scale, saved[1], saved[2], grad_out, grad_qkv);
    return {grad_qkv, at::Tensor()};
  }
};

}  // namespace

namespace reference {

at::Tensor packed_attention(const at::Tensor& qkv, double scale) {
  const at::ScalarType dtype = qkv.scalar_type();
  const bool upcast = dtype == at::kHalf && qkv.device().is_cpu();
  const at::Tensor packed = (upcast ? qkv.to(at::kFloat) : qkv);
  const at::Tensor scores =
      at::matmul(heads(packed, 0), heads(packed, 1).transpose(-2, -1)) * scale;  // (B, H, N, N)
  const at::ScalarType softmax_dtype = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor weights = at::softmax(scores, -1, softmax_dtype).to(packed.scalar_type());
  return at::matmul(weights, heads(packed, 2)).transpose(1, 2).flatten(2).to(dtype);
}

}  // namespace reference

at::Tensor packed_attention(const at::Tensor& qkv, double scale) {
  check(qkv);
  if (Simd::choose(qkv) || qkv.is_meta()) return PackedAttention::apply(qkv, scale);
  return reference::packed_attention(qkv, scale);
}

}  // namespace kiln::ops
