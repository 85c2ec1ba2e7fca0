#include "ops/matrix_products.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "core/aten.h"
#include "core/scratch.h"
#include "core/tensors.h"
#include "ops/cpu/column_sum.h"
#include "ops/cpu/instruction_set.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/product_scratch.h"
#include "ops/kernel_types.h"
#include "ops/op_mark.h"

namespace kiln::ops {
namespace {

// The operand as it is multiplied: ATen's fp16 products on a CPU are a hundred times slower than its f32
// ones.
at::Tensor operand(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf && computes_on_cpu(tensor) ? tensor.to(at::kFloat) : tensor;
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

// In a dry run: takes and gives back what oneDNN would inside the product of `a` that has just been made.
void touch_scratch(cpu::Product product, const at::Tensor& result, const at::Tensor& a) {
  if (!a.is_meta() || !computes_on_cpu(a)) return;
  const int64_t k = a.numel() / std::max<int64_t>(result.size(0), 1);
  const int64_t bytes =
      cpu::product_scratch_bytes(product, a.scalar_type(), result.size(0), result.size(1), k);
  at::empty({bytes}, a.options().dtype(at::kByte));
}

constexpr int64_t kRowsPerPartial = 256;  // fixed, so that the bits do not depend on the threads

at::Tensor column_sum(const at::Tensor& rows) {
  const int64_t num_rows = rows.size(0), width = rows.size(1),
                num_partials = at::divup(num_rows, kRowsPerPartial);
  at::Tensor sums = at::empty({width}, rows.options());
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

at::Tensor affine_grad_weight(const at::Tensor& grad, const at::Tensor& rows) {
  OpMark mark("kiln::affine_grad_weight", grad, rows);
  const ScratchScope scope(Scratch::kMatmul);
  const at::Tensor g = operand(grad).t(), product = at::mm(g, operand(rows));
  touch_scratch(cpu::Product::kTransposed, product, g);
  return product.to(grad.scalar_type());
}

at::Tensor affine_grad_bias(const at::Tensor& grad) {
  OpMark mark("kiln::affine_grad_bias", grad);
  return grad.is_contiguous() && has_kernel(grad) && computes_on_cpu(grad) ? column_sum(grad)
                                                                           : at::sum(grad, 0);
}

}  // namespace kiln::ops
