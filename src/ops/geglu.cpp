#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "core/aten.h"
#include "core/error.h"
#include "ops/gelu.h"
#include "ops/op_mark.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Recomputes the gate's activation in backward.
struct Geglu : torch::autograd::Function<Geglu> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& h) {
    ctx->save_for_backward({h});
    return geglu_forward(h);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {geglu_backward(grads[0], ctx->get_saved_variables()[0])};
  }
};

}  // namespace

at::Tensor geglu_forward(const at::Tensor& h) {
  OpMark mark("kiln::geglu", h);
  const int64_t width = h.size(-1) / 2;
  at::Tensor out = at::gelu(h.narrow(-1, width, width));
  out.mul_(h.narrow(-1, 0, width));
  mark.outputs(out);
  return out;
}

at::Tensor geglu_backward(const at::Tensor& grad, const at::Tensor& h) {
  OpMark mark("kiln::geglu_backward", grad, h);
  const int64_t width = h.size(-1) / 2;
  const at::Tensor value = h.narrow(-1, 0, width), gate = h.narrow(-1, width, width);
  at::Tensor grad_h = at::empty_like(h);
  grad_h.narrow(-1, 0, width).copy_(at::gelu(gate).mul_(grad));
  grad_h.narrow(-1, width, width).copy_(at::gelu_backward(grad * value, gate));
  mark.outputs(grad_h);
  return grad_h;
}

namespace reference {

at::Tensor geglu(const at::Tensor& h) {
  const int64_t width = h.size(-1) / 2;
  const at::Tensor gate = h.narrow(-1, width, width);
  return h.narrow(-1, 0, width) * (0.5 * gate * (1 + at::erf(gate * std::sqrt(0.5))));
}

}  // namespace reference

at::Tensor geglu(const at::Tensor& h) {
  if (h.dim() < 1 || h.size(-1) % 2 != 0)
    fail("geglu", "expected h (..., 2F), got {}", fmt::join(h.sizes(), "x"));
  return Geglu::apply(h);
}

}  // namespace kiln::ops
