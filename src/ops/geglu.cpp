#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <vector>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "core/threads/parallel_pieces.h"
#include "ops/cpu/kernels.h"
#include "ops/gelu.h"
#include "ops/kernels.h"
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

constexpr int64_t kPiece = 16384;  // elements

// Calls body(first row, rows) for pieces of (..., width).
template <class Body>
void for_rows(const at::Tensor& tensor, const Body& body) {
  const int64_t width = tensor.size(-1), rows = width > 0 ? tensor.numel() / width : 0;
  parallel_pieces(rows, std::max<int64_t>(1, kPiece / std::max<int64_t>(1, width)),
                  [&](int64_t begin, int64_t end) { body(begin, static_cast<size_t>(end - begin)); });
}

void geglu_on_cpu(const at::Tensor& h, const at::Tensor& out) {
  const Dtype dtype = from_scalar_type(h.scalar_type());
  const int64_t bytes = out.size(-1) * out.element_size();
  for_rows(out, [&](int64_t first, size_t rows) {
    cpu::geglu(dtype, static_cast<const char*>(h.const_data_ptr()) + first * 2 * bytes,
               static_cast<char*>(out.mutable_data_ptr()) + first * bytes, rows,
               static_cast<size_t>(out.size(-1)));
  });
}

void geglu_grad_on_cpu(const at::Tensor& grad, const at::Tensor& h, const at::Tensor& grad_h) {
  const Dtype dtype = from_scalar_type(h.scalar_type());
  const int64_t bytes = grad.size(-1) * grad.element_size();
  for_rows(grad, [&](int64_t first, size_t rows) {
    cpu::geglu_grad(dtype, static_cast<const char*>(grad.const_data_ptr()) + first * bytes,
                    static_cast<const char*>(h.const_data_ptr()) + first * 2 * bytes,
                    static_cast<char*>(grad_h.mutable_data_ptr()) + first * 2 * bytes, rows,
                    static_cast<size_t>(grad.size(-1)));
  });
}

constexpr Kernel<decltype(geglu_on_cpu)> kGeglu{.cpu = geglu_on_cpu};
constexpr Kernel<decltype(geglu_grad_on_cpu)> kGegluGrad{.cpu = geglu_grad_on_cpu};

}  // namespace

at::Tensor geglu_forward(const at::Tensor& h) {
  OpMark mark("kiln::geglu", h);
  const int64_t width = h.size(-1) / 2;
  at::Tensor out;
  if (const auto kernel = kGeglu.serving(h); kernel && h.is_contiguous()) {
    std::vector<int64_t> sizes = h.sizes().vec();
    sizes.back() = width;
    out = at::empty(sizes, h.options());
    kernel(h, out);
  } else {
    out = at::gelu(h.narrow(-1, width, width));
    out.mul_(h.narrow(-1, 0, width));
  }
  mark.outputs(out);
  return out;
}

at::Tensor geglu_backward(const at::Tensor& grad, const at::Tensor& h) {
  OpMark mark("kiln::geglu_backward", grad, h);
  const int64_t width = h.size(-1) / 2;
  at::Tensor grad_h = at::empty_like(h);
  if (const auto kernel = kGegluGrad.serving(h); kernel && h.is_contiguous() && grad.is_contiguous()) {
    kernel(grad, h, grad_h);
  } else {
    const at::Tensor value = h.narrow(-1, 0, width), gate = h.narrow(-1, width, width);
    grad_h.narrow(-1, 0, width).copy_(at::gelu(gate).mul_(grad));
    grad_h.narrow(-1, width, width).copy_(at::gelu_backward(grad * value, gate));
  }
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
