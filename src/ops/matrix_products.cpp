#include "ops/matrix_products.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "core/aten.h"
#include "core/scratch.h"
#include "core/tensors.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/onednn_scratch.h"
#include "ops/cuda/launch.h"
#include "ops/gelu.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"

namespace kiln::ops {
namespace {

// Returns the operand in the dtype that is multiplied.
at::Tensor operand(const at::Tensor& tensor) {
  return tensor.to(product_dtype(tensor.device(), tensor.scalar_type()));
}

// oneDNN's linear adds the bias in the product's own pass, where at::addmm writes and reads the result once
// more. f32 and bf16 run 8 to 20 % faster.
at::Tensor onednn_linear(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias) {
  using Signature =
      at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::string_view,
                 c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<Signature>();
  return op.call(rows, weight, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

bool onednn_takes(const at::Tensor& rows, const at::Tensor& weight) {
  const at::ScalarType dtype = rows.scalar_type();
  return rows.is_cpu() && rows.numel() > 0 && weight.numel() > 0 && at::hasMKLDNN() &&
         (dtype == at::kFloat || dtype == at::kBFloat16);
}

// Stands for oneDNN in a dry run: allocates and frees the scratch of the product of `a` that has just been
// made.
void touch_scratch(cpu::Product product, const at::Tensor& result, const at::Tensor& a) {
  if (!a.is_meta() || !computes_on_cpu(a)) return;
  const int64_t k = a.numel() / std::max<int64_t>(result.size(0), 1);
  const int64_t bytes =
      cpu::product_scratch_bytes(product, a.scalar_type(), result.size(0), result.size(1), k);
  at::empty({bytes}, a.options().dtype(at::kByte));
}

constexpr int64_t kRowsPerPartial = 256;  // fixed, so that the bits do not depend on the threads

at::Tensor column_sum(const at::Tensor& rows, const at::Tensor& memory) {
  const int64_t num_rows = rows.size(0), width = rows.size(1),
                num_partials = at::divup(num_rows, kRowsPerPartial);
  at::Tensor sums = memory.defined() ? memory : at::empty({width}, rows.options());
  const at::Tensor partials = at::empty({num_partials, width}, rows.options().dtype(at::kFloat));
  if (rows.is_meta()) return sums;
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  float* to = partials.mutable_data_ptr<float>();
  const Dtype dtype = from_scalar_type(rows.scalar_type());
  at::parallel_for(0, num_partials, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i * kRowsPerPartial;
      cpu::column_sum(dtype, from + first * width * rows.element_size(),
                      std::min(kRowsPerPartial, num_rows - first), width, to + i * width);
    }
  });
  cpu::sum_partials(to, num_partials, width, sums.mutable_data_ptr(), dtype, width);
  return sums;
}

}  // namespace

at::Tensor affine(const at::Tensor& rows, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  OpMark mark("kiln::affine", rows, weight, bias.value_or(at::Tensor()));
  const ScratchScope scope(Scratch::kMatmul);
  const at::Tensor a = operand(rows), b = operand(weight);
  at::Tensor y;
  if (!bias)
    y = at::mm(a, b.t());
  else if (onednn_takes(a, b))
    y = onednn_linear(a, b, operand(*bias));
  else
    y = at::addmm(operand(*bias), a, b.t());
  touch_scratch(cpu::Product::kAffine, y, a);
  return y.to(rows.scalar_type());
}

at::Tensor affine_grad_rows(const at::Tensor& grad, const at::Tensor& weight) {
  OpMark mark("kiln::affine_grad_rows", grad, weight);
  const ScratchScope scope(Scratch::kMatmul);
  const at::Tensor g = operand(grad), product = at::mm(g, operand(weight));
  touch_scratch(cpu::Product::kPlain, product, g);
  return product.to(grad.scalar_type());
}

at::Tensor affine_grad_weight(const at::Tensor& grad, const at::Tensor& rows, at::Tensor memory) {
  OpMark mark("kiln::affine_grad_weight", grad, rows);
  const ScratchScope scope(Scratch::kMatmul);
  const at::Tensor g = operand(grad).t(), b = operand(rows);
  if (memory.defined() && memory.scalar_type() == g.scalar_type()) {
    at::mm_out(memory, g, b);
    touch_scratch(cpu::Product::kTransposed, memory, g);
    return memory;
  }
  const at::Tensor product = at::mm(g, b);
  touch_scratch(cpu::Product::kTransposed, product, g);
  if (!memory.defined()) return product.to(grad.scalar_type());
  memory.copy_(product);
  return memory;
}

at::Tensor affine_grad_bias(const at::Tensor& grad, at::Tensor memory) {
  OpMark mark("kiln::affine_grad_bias", grad);
  if (grad.is_contiguous() && has_kernel(grad) && computes_on_cpu(grad)) return column_sum(grad, memory);
  return memory.defined() ? at::sum_out(memory, grad, 0) : at::sum(grad, 0);
}

namespace {

// True on a GPU, or in a dry run of one, for dtypes that cuBLASLt's epilogues take. A dry run assumes that
// the GPU has them.
bool has_epilogues(const at::Tensor& tensor) {
  const bool on_gpu = computes_on_cuda(tensor) && has_kernel(tensor);
  return on_gpu && (tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf);
}

at::Tensor memory_like(const at::Tensor& memory, at::IntArrayRef sizes, const at::Tensor& like) {
  return memory.defined() ? memory : at::empty(sizes, like.options());
}

void* data_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_meta() ? tensor.mutable_data_ptr() : nullptr;
}

// Returns false if it did nothing. `hidden` may be undefined.
bool with_epilogue(EpilogueProduct product, const at::Tensor& left, const at::Tensor& right,
                   const at::Tensor& result, const at::Tensor& bias, const at::Tensor& hidden) {
  if (left.numel() == 0 || !left.is_contiguous() || !right.is_contiguous()) return false;
  if (left.is_meta()) {
    at::empty({cuda::kEpilogueWorkspaceBytes}, left.options().dtype(at::kByte));
    return true;
  }
  const bool is_affine = product == EpilogueProduct::kAffineGelu;
  const EpilogueProductArgs args{
      .product = product,
      .dtype = from_scalar_type(left.scalar_type()),
      .rows = static_cast<size_t>(left.size(0)),
      .out_features = static_cast<size_t>(is_affine ? result.size(1) : left.size(1)),
      .in_features = static_cast<size_t>(is_affine ? left.size(1) : result.size(1)),
      .left = left.const_data_ptr(),
      .right = right.const_data_ptr(),
      .result = data_of(result),
      .bias = data_of(bias),
      .hidden = data_of(hidden)};
  return cuda::epilogue_product(args, result);
}

}  // namespace

AffineGrads affine_grads(const at::Tensor& grad, const at::Tensor& rows, const AffineGrads& memory) {
  if (has_epilogues(grad)) {
    OpMark mark("kiln::affine_grad_weight", grad, rows);
    const ScratchScope scope(Scratch::kMatmul);
    AffineGrads grads{memory_like(memory.weight, {grad.size(1), rows.size(1)}, grad),
                      memory_like(memory.bias, {grad.size(1)}, grad)};
    if (with_epilogue(EpilogueProduct::kGradWeight, grad, rows, grads.weight, grads.bias, {})) return grads;
  }
  const at::Tensor bias = affine_grad_bias(grad, memory.bias);
  return {affine_grad_weight(grad, rows, memory.weight), bias};
}

GeluResult affine_gelu(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias) {
  if (has_epilogues(rows)) {
    OpMark mark("kiln::affine_gelu", rows, weight, bias);
    const ScratchScope scope(Scratch::kMatmul);
    const at::Tensor hidden = at::empty({rows.size(0), weight.size(0)}, rows.options());
    const at::Tensor activation = at::empty_like(hidden);
    mark.outputs(hidden, activation);
    if (with_epilogue(EpilogueProduct::kAffineGelu, rows, weight, activation, bias, hidden))
      return {hidden, activation};
  }
  GeluResult result{.hidden = affine(rows, weight, bias), .activation = {}};
  result.activation = at::empty_like(result.hidden);
  gelu_tanh_forward(result.hidden, result.activation);
  return result;
}

HiddenGrads affine_grad_rows_gelu(const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& hidden,
                                  const at::Tensor& bias_memory) {
  if (has_epilogues(grad)) {
    OpMark mark("kiln::affine_grad_rows_gelu", grad, weight, hidden);
    const ScratchScope scope(Scratch::kMatmul);
    HiddenGrads grads{at::empty_like(hidden), memory_like(bias_memory, {hidden.size(1)}, grad)};
    mark.outputs(grads.hidden, grads.bias);
    if (with_epilogue(EpilogueProduct::kGradRowsGelu, grad, weight, grads.hidden, grads.bias, hidden))
      return grads;
  }
  HiddenGrads grads{.hidden = affine_grad_rows(grad, weight), .bias = {}};
  gelu_tanh_backward(grads.hidden, hidden, grads.hidden);
  grads.bias = affine_grad_bias(grads.hidden, bias_memory);
  return grads;
}

}  // namespace kiln::ops
