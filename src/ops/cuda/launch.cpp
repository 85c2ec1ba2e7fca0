#include "ops/cuda/launch.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "ops/cuda/kernels.h"

namespace kiln::ops::cuda {

#ifdef KILN_CUDA_KERNELS

bool kernels_compiled() { return true; }

namespace {

// Runs `launch(stream)` on the device of `tensor` and its current stream. The stream comes through c10's
// device interface, so that this file needs no CUDA header.
template <class Launch>
void enqueue(const char* kernel, const at::Tensor& tensor, const Launch& launch) {
  const c10::DeviceGuard guard(tensor.device());
  const c10::Stream stream = c10::impl::VirtualGuardImpl(at::kCUDA).getStream(tensor.device());
  const int error = launch(stream.native_handle());
  if (error == 0) return;
  char text[256];
  kiln_cuda_error_text(error, text, sizeof text);
  fail(kernel, "the CUDA kernel failed to start: {}", text);
}

Dtype dtype_of(const at::Tensor& tensor) { return from_scalar_type(tensor.scalar_type()); }

}  // namespace

void gelu_tanh(const at::Tensor& in, const at::Tensor& out) {
  enqueue("gelu_tanh", in, [&](void* stream) {
    return kiln_cuda_gelu_tanh(dtype_of(in), in.const_data_ptr(), out.mutable_data_ptr(), in.numel(), stream);
  });
}

void gelu_tanh_grad(const at::Tensor& grad, const at::Tensor& in, const at::Tensor& grad_in) {
  enqueue("gelu_tanh_grad", in, [&](void* stream) {
    return kiln_cuda_gelu_tanh_grad(dtype_of(in), grad.const_data_ptr(), in.const_data_ptr(),
                                    grad_in.mutable_data_ptr(), in.numel(), stream);
  });
}

void adaln(const AdalnArgs& args, const at::Tensor& out) {
  enqueue("adaln", out, [&](void* stream) {
    return kiln_cuda_adaln(&args, out.mutable_data_ptr(), dtype_of(out), out.size(0) * out.size(1), stream);
  });
}

void adaln_grad(const AdalnArgs& args, const at::Tensor& grad, const at::Tensor& dx, const at::Tensor& dshift,
                const at::Tensor& dscale, const at::Tensor& partials, int64_t rows_per_partial) {
  enqueue("adaln_grad", grad, [&](void* stream) {
    return kiln_cuda_adaln_grad(&args, grad.const_data_ptr(), dtype_of(grad), dx.mutable_data_ptr(),
                                dshift.mutable_data_ptr(), dscale.mutable_data_ptr(),
                                partials.mutable_data_ptr<float>(), rows_per_partial, grad.size(0), stream);
  });
}

void gated_residual(const GatedResidualArgs& args, const at::Tensor& x, const at::Tensor& out) {
  enqueue("gated_residual", x, [&](void* stream) {
    return kiln_cuda_gated_residual(&args, x.const_data_ptr(), out.mutable_data_ptr(), dtype_of(x),
                                    x.size(0) * x.size(1), stream);
  });
}

void gated_residual_grad(const GatedResidualArgs& args, const at::Tensor& grad, const at::Tensor& dy,
                         const at::Tensor& dgate, const at::Tensor& partials, int64_t rows_per_partial) {
  enqueue("gated_residual_grad", grad, [&](void* stream) {
    return kiln_cuda_gated_residual_grad(&args, grad.const_data_ptr(), dtype_of(grad), dy.mutable_data_ptr(),
                                         dgate.mutable_data_ptr(), partials.mutable_data_ptr<float>(),
                                         rows_per_partial, grad.size(0), stream);
  });
}

void adamw(const AdamwElements& elements, const AdamwFactors& factors, const at::Tensor& master) {
  enqueue("adamw", master,
          [&](void* stream) { return kiln_cuda_adamw(&elements, &factors, master.numel(), stream); });
}

at::Tensor sum_of_squares(const at::Tensor& flat) {
  const auto options = flat.options().dtype(at::kDouble);
  const at::Tensor sum = at::empty({}, options), partials = at::empty({kSumOfSquaresPartials}, options);
  enqueue("sum_of_squares", flat, [&](void* stream) {
    return kiln_cuda_sum_of_squares(dtype_of(flat), flat.const_data_ptr(), flat.numel(),
                                    partials.mutable_data_ptr<double>(), sum.mutable_data_ptr<double>(),
                                    stream);
  });
  return sum;
}

#else

bool kernels_compiled() { return false; }

namespace {
[[noreturn]] void missing() { TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels"); }
}  // namespace

void gelu_tanh(const at::Tensor&, const at::Tensor&) { missing(); }
void gelu_tanh_grad(const at::Tensor&, const at::Tensor&, const at::Tensor&) { missing(); }
void adaln(const AdalnArgs&, const at::Tensor&) { missing(); }
void adaln_grad(const AdalnArgs&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                const at::Tensor&, int64_t) {
  missing();
}
void gated_residual(const GatedResidualArgs&, const at::Tensor&, const at::Tensor&) { missing(); }
void gated_residual_grad(const GatedResidualArgs&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                         const at::Tensor&, int64_t) {
  missing();
}
void adamw(const AdamwElements&, const AdamwFactors&, const at::Tensor&) { missing(); }
at::Tensor sum_of_squares(const at::Tensor&) { missing(); }

#endif

}  // namespace kiln::ops::cuda
