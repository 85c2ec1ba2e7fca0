#include "ops/relu.h"

#include <ATen/ops/threshold_backward.h>
#include <torch/csrc/autograd/custom_function.h>

#include "core/aten.h"
#include "ops/op_mark.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ATen's relu is its clamp_min, which has a Meta kernel. Their gradients differ at 0: relu's is 0.
struct Relu : torch::autograd::Function<Relu> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    OpMark mark("kiln::relu", x);
    const at::Tensor out = at::clamp_min(x, 0);
    ctx->save_for_backward({out});
    mark.outputs(out);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor out = ctx->get_saved_variables()[0];
    OpMark mark("kiln::relu_backward", grads[0], out);
    const at::Tensor grad_x = at::threshold_backward(grads[0], out, 0);
    mark.outputs(grad_x);
    return {grad_x};
  }
};

}  // namespace

namespace reference {

at::Tensor relu(const at::Tensor& x) { return at::where(x <= 0, at::zeros_like(x), x); }

}  // namespace reference

at::Tensor relu(const at::Tensor& x) { return Relu::apply(x); }

}  // namespace kiln::ops
