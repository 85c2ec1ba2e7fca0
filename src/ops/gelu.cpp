#include "ops/gelu.h"

#include "core/aten.h"
#include "core/tensors.h"
#include "core/threads/parallel_pieces.h"
#include "ops/cpu/kernels.h"
#include "ops/cuda/launch.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"

namespace kiln::ops {
namespace {

constexpr int64_t kGeluPiece = 16384;  // elements

void check_contiguous(const at::Tensor& in, const at::Tensor& out) {
  TORCH_INTERNAL_ASSERT(in.is_contiguous() && out.is_contiguous() && in.sizes() == out.sizes() &&
                        in.scalar_type() == out.scalar_type());
}

void gelu_on_cpu(const at::Tensor& in, const at::Tensor& out) {
  const Dtype dtype = from_scalar_type(in.scalar_type());
  const size_t size = dtype_size(dtype);
  const char* from = static_cast<const char*>(in.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  parallel_pieces(in.numel(), kGeluPiece, [&](int64_t begin, int64_t end) {
    cpu::gelu_tanh(dtype, from + begin * size, to + begin * size, end - begin);
  });
}

void gelu_grad_on_cpu(const at::Tensor& grad, const at::Tensor& in, const at::Tensor& grad_in) {
  const Dtype dtype = from_scalar_type(in.scalar_type());
  const size_t size = dtype_size(dtype);
  const char* g = static_cast<const char*>(grad.const_data_ptr());
  const char* from = static_cast<const char*>(in.const_data_ptr());
  char* to = static_cast<char*>(grad_in.mutable_data_ptr());
  parallel_pieces(in.numel(), kGeluPiece, [&](int64_t begin, int64_t end) {
    cpu::gelu_tanh_grad(dtype, g + begin * size, from + begin * size, to + begin * size, end - begin);
  });
}

constexpr Kernel<decltype(gelu_on_cpu)> kGelu{.cpu = gelu_on_cpu, .cuda = cuda::gelu_tanh};
constexpr Kernel<decltype(gelu_grad_on_cpu)> kGeluGrad{.cpu = gelu_grad_on_cpu, .cuda = cuda::gelu_tanh_grad};

}  // namespace

void gelu_tanh_forward(const at::Tensor& in, at::Tensor& out) {
  check_contiguous(in, out);
  OpMark mark("kiln::gelu_tanh", in);
  mark.outputs(out);
  const auto kernel = kGelu.serving(in);
  if (!kernel)
    at::gelu_out(out, in, "tanh");
  else if (in.numel() > 0)
    kernel(in, out);
}

void gelu_tanh_backward(const at::Tensor& grad, const at::Tensor& in, at::Tensor& grad_in) {
  check_contiguous(grad, in);
  check_contiguous(in, grad_in);
  OpMark mark("kiln::gelu_tanh_backward", grad, in);
  mark.outputs(grad_in);
  const auto kernel = kGeluGrad.serving(in);
  if (!kernel)
    at::gelu_backward_out(grad_in, grad, in, "tanh");
  else if (in.numel() > 0)
    kernel(grad, in, grad_in);
}

}  // namespace kiln::ops
