#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <string>

#include "core/aten.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"
#include "ops/planned/planned.h"

namespace kiln::ops::planned {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Allocates, for a dry run of a CPU, a block of scores for every thread (cpu_flash_attention in ATen's
// FlashAttentionKernel.cpp).
void touch_thread_scratch(const at::Tensor& q, const at::Tensor& k) {
  if (computes_on_cuda(q)) return;
  const int64_t num_queries = q.size(2);
  const int64_t rows = std::min<int64_t>(num_queries >= 768   ? 256
                                         : num_queries >= 192 ? 64
                                                              : 32,
                                         num_queries);
  const int64_t keys = std::min<int64_t>(512, k.size(2)), threads = at::get_num_threads();
  const bool is_half = q.scalar_type() != at::kFloat;
  const at::Tensor taken[] = {
      at::empty({threads, rows * (keys + 2 + q.size(3))}, q.options().dtype(at::kFloat)),
      at::empty({threads, rows, is_half ? keys : 0}, q.options())};
}

// Returns the kernel that ATen would choose on the device that meta stands for.
std::string kernel_name(const at::Tensor& q, bool has_mask) {
  constexpr int64_t kWidestFlash = 256;
  if (!computes_on_cuda(q)) return "aten::_scaled_dot_product_flash_attention_for_cpu";
  const bool is_flash = !has_mask && q.scalar_type() != at::kFloat && q.size(3) <= kWidestFlash;
  return is_flash ? "aten::_scaled_dot_product_flash_attention"
                  : "aten::_scaled_dot_product_efficient_attention";
}

// On meta ATen would take its composed path, which holds the scores of all pairs. This allocates what the
// kernels of devices do: the result and a sum for each query.
struct FusedOnMeta : torch::autograd::Function<FusedOnMeta> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const std::optional<at::Tensor>& mask) {
    const std::string name = kernel_name(q, mask.has_value());
    OpMark mark(name, q, k, v, mask.value_or(at::Tensor()));
    at::Tensor out = at::empty({q.size(0), q.size(2), q.size(1), q.size(3)}, q.options()).transpose(1, 2);
    const at::Tensor sums =
        at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat)).transpose(1, 2);
    touch_thread_scratch(q, k);
    ctx->save_for_backward({q, k, v, out, sums, mask.value_or(at::Tensor())});
    ctx->saved_data["name"] = name + "_backward";
    mark.outputs(out, sums);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const std::string name = ctx->saved_data["name"].toStringRef();
    OpMark mark(name, grads[0], q, k, v, saved[3], saved[4], saved[5]);
    const at::Tensor grad_mask =
        saved[5].defined() && ctx->needs_input_grad(3) ? at::empty_like(saved[5]) : at::Tensor();
    variable_list made = {at::empty_like(q), at::empty_like(k), at::empty_like(v), grad_mask};
    mark.outputs(made[0], made[1], made[2]);
    return made;
  }
};

}  // namespace

at::Tensor fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const std::optional<at::Tensor>& mask, std::optional<double> scale) {
  // A CPU's kernel has no gradient of the mask, so ATen composes attention whose mask is trained.
  if (!computes_on_cuda(q) && mask && mask->requires_grad())
    return at::scaled_dot_product_attention(q, k, v, mask, /*dropout_p=*/0.0, /*is_causal=*/false, scale);
  return FusedOnMeta::apply(q, k, v, mask);
}

}  // namespace kiln::ops::planned
