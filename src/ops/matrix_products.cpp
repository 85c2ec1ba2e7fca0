#include "ops/matrix_products.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "core/tensors.h"
#include "ops/cpu/column_sum.h"
#include "ops/cpu/instruction_set.h"
#include "ops/cpu/kernels.h"
#include "ops/kernel_types.h"
#include "ops/op_mark.h"

namespace kiln::ops {
namespace {

// The operand as it is multiplied: ATen's fp16 products on a CPU are a hundred times slower than its f32
// ones.
at::Tensor operand(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf && tensor.device().is_cpu() ? tensor.to(at::kFloat) : tensor;
}

// oneDNN's linear with the bias added in the product's own pass, where at::addmm writes and reads the result
// once more: f32 and bf16 run 8 to 20 % faster.
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
         (dtype == at::kFloat || (dtype == at::kBFloat16 && cpu::chosen_avx512()));
}

constexpr int64_t kRowsPerPartial = 256;  // fixed, so that the bits do not depend on the threads

at::Tensor column_sum(const at::Tensor& rows) {
  const int64_t num_rows = rows.size(0), width = rows.size(1),
                num_partials = at::divup(num_rows, kRowsPerPartial);
  at::Tensor sums = at::empty({width}, rows.options());
  if (rows.is_meta()) return sums;
  const at::Tensor partials = at::empty({num_partials, width}, rows.options().dtype(at::kFloat));
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
  const at::Tensor a = operand(rows), b = operand(weight);
  if (!bias) return at::mm(a, b.t()).to(rows.scalar_type());
  const at::Tensor y =
      onednn_takes(a, b) ? onednn_linear(a, b, operand(*bias)) : at::addmm(operand(*bias), a, b.t());
  return y.to(rows.scalar_type());
}

at::Tensor affine_grad_rows(const at::Tensor& grad, const at::Tensor& weight) {
  OpMark mark("kiln::affine_grad_rows", grad, weight);
  return at::mm(operand(grad), operand(weight)).to(grad.scalar_type());
}

at::Tensor affine_grad_weight(const at::Tensor& grad, const at::Tensor& rows) {
  OpMark mark("kiln::affine_grad_weight", grad, rows);
  return at::mm(operand(grad).t(), operand(rows)).to(grad.scalar_type());
}

at::Tensor affine_grad_bias(const at::Tensor& grad) {
  OpMark mark("kiln::affine_grad_bias", grad);
  return grad.is_contiguous() && has_kernel(grad) && !grad.is_cuda() ? column_sum(grad) : at::sum(grad, 0);
}

}  // namespace kiln::ops
