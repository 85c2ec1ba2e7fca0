// ATen's functions in dry runs: what its kernels allocate, and kernels of meta that LibTorch lacks without
// Python.
#include <torch/library.h>

#include <algorithm>

#include "core/aten.h"
#include "ops/cpu/onednn_scratch.h"
#include "ops/kernels.h"
#include "ops/matrix_products.h"
#include "ops/planned/planned.h"

namespace kiln::ops::planned {
namespace {

using MaybeTensor = std::optional<at::Tensor>;
using Tensors3 = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

at::Tensor like_if(bool wanted, const at::Tensor& tensor) {
  return wanted ? at::empty_like(tensor) : at::Tensor();
}

// Returns memory like the copies that oneDNN and cuDNN are given of tensors that are not in the format of the
// convolution: a channels-last picture meets the weight of a parameter, which is contiguous.
std::vector<at::Tensor> copies_to(at::MemoryFormat format, std::initializer_list<at::Tensor> tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors)
    if (!tensor.is_contiguous(format)) copies.push_back(at::empty(tensor.sizes(), tensor.options(), format));
  return copies;
}

// Stands for oneDNN in a dry run: allocates and frees the scratch of a convolution.
void touch_convolution(int64_t (*scratch_bytes)(const cpu::ConvolutionSize&), const at::Tensor& input,
                       const at::Tensor& weight, const at::Tensor& output, at::IntArrayRef stride,
                       at::IntArrayRef padding, int64_t groups) {
  if (!computes_on_cpu(input)) return;
  const cpu::ConvolutionSize size{.dtype = input.scalar_type(),
                                  .batch = input.size(0),
                                  .in_channels = input.size(1),
                                  .out_channels = weight.size(0),
                                  .kernel_elements = weight.size(2) * weight.size(3),
                                  .in_height = input.size(2),
                                  .in_width = input.size(3),
                                  .out_pixels = output.size(2) * output.size(3),
                                  .padding = padding[1],
                                  .groups = groups,
                                  .is_strided = stride[0] > 1 || stride[1] > 1};
  at::empty({scratch_bytes(size)}, input.options().dtype(at::kByte));
}

// LibTorch without Python has no convolution on meta. Backends without their own convolution end here.
// Handles two spatial dimensions and no transposition.
at::Tensor convolution_on_meta(const at::Tensor& input, const at::Tensor& weight,
                               const std::optional<at::Tensor>&, at::IntArrayRef stride,
                               at::IntArrayRef padding, at::IntArrayRef dilation, bool, at::IntArrayRef,
                               int64_t groups) {
  std::vector<int64_t> shape = {input.size(0), weight.size(0)};
  for (int64_t d = 0; d < 2; ++d) {
    const int64_t reach = dilation[d] * (weight.size(d + 2) - 1) + 1;
    shape.push_back((input.size(d + 2) + 2 * padding[d] - reach) / stride[d] + 1);
  }
  const at::MemoryFormat format = convolution_format(input, weight);
  const std::vector<at::Tensor> copies = copies_to(format, {input, weight});
  at::Tensor out = at::empty(shape, input.options(), format);
  touch_convolution(cpu::convolution_scratch_bytes, input, weight, out, stride, padding, groups);
  return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward_on_meta(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef, bool, at::IntArrayRef, int64_t groups,
    std::array<bool, 3> wanted) {
  const at::MemoryFormat format = convolution_format(input, weight);
  const std::vector<at::Tensor> copies = copies_to(format, {grad_output, input, weight});
  const auto touch = [&](int64_t (*scratch_bytes)(const cpu::ConvolutionSize&)) {
    touch_convolution(scratch_bytes, input, weight, grad_output, stride, padding, groups);
  };
  at::Tensor grad_input, grad_weight, grad_bias;
  if (wanted[0]) {
    grad_input = at::empty(input.sizes(), input.options(), format);
    touch(cpu::convolution_grad_x_scratch_bytes);
  }
  if (wanted[1]) grad_weight = at::empty(weight.sizes(), weight.options(), format);
  if (wanted[2]) grad_bias = at::empty({grad_output.size(1)}, weight.options());
  if (wanted[1] || wanted[2]) touch(cpu::convolution_grad_weight_scratch_bytes);
  return {grad_input, grad_weight, grad_bias};
}

// On meta, ATen's scaled_dot_product_attention takes its composed path, which ends here.
at::Tensor safe_softmax_on_meta(const at::Tensor& input, int64_t, std::optional<at::ScalarType> dtype) {
  return at::empty_like(input, input.options().dtype(dtype.value_or(input.scalar_type())));
}

Tensors3 native_group_norm(const at::Tensor& x, const MaybeTensor& weight, const MaybeTensor&, int64_t batch,
                           int64_t, int64_t, int64_t num_groups, double) {
  const auto statistics = x.options().dtype(weight->scalar_type());
  return {at::empty_like(x), at::empty({batch, num_groups}, statistics),
          at::empty({batch, num_groups}, statistics)};
}

Tensors3 native_group_norm_backward(const at::Tensor&, const at::Tensor& x, const at::Tensor&,
                                    const at::Tensor&, const MaybeTensor& weight, int64_t, int64_t, int64_t,
                                    int64_t, std::array<bool, 3> wanted) {
  return {like_if(wanted[0], x), like_if(wanted[1], *weight), like_if(wanted[2], *weight)};
}

Tensors3 native_layer_norm(const at::Tensor& x, at::IntArrayRef, const MaybeTensor&, const MaybeTensor&,
                           double) {
  std::vector<int64_t> rows = x.sizes().vec();
  rows.back() = 1;
  const auto f32 = x.options().dtype(at::kFloat);
  return {at::empty_like(x), at::empty(rows, f32), at::empty(rows, f32)};
}

Tensors3 native_layer_norm_backward(const at::Tensor&, const at::Tensor& x, at::IntArrayRef,
                                    const at::Tensor&, const at::Tensor&, const MaybeTensor& weight,
                                    const MaybeTensor& bias, std::array<bool, 3> wanted) {
  return {like_if(wanted[0], x), like_if(wanted[1], *weight), like_if(wanted[2], *bias)};
}

at::Tensor embedding(const at::Tensor& table, const at::Tensor& ids, int64_t, bool, bool) {
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(table.size(1));
  return at::empty(shape, table.options());
}

at::Tensor embedding_dense_backward(const at::Tensor& grad, const at::Tensor&, int64_t num_rows, int64_t,
                                    bool) {
  return at::empty({num_rows, grad.size(-1)}, grad.options());
}

TORCH_LIBRARY_IMPL(aten, Meta, library) {
  library.impl("native_group_norm", native_group_norm);
  library.impl("native_group_norm_backward", native_group_norm_backward);
  library.impl("native_layer_norm", native_layer_norm);
  library.impl("native_layer_norm_backward", native_layer_norm_backward);
  library.impl("embedding", embedding);
  library.impl("embedding_dense_backward", embedding_dense_backward);
  library.impl("convolution_overrideable", convolution_on_meta);
  library.impl("convolution_backward_overrideable", convolution_backward_on_meta);
  library.impl("_safe_softmax", safe_softmax_on_meta);
}

// Undefined if a sum in `dtype` makes no copy.
at::Tensor wide_copy(const at::Tensor& term, at::ScalarType dtype) {
  return term.scalar_type() == dtype ? at::Tensor() : at::empty(term.sizes(), term.options().dtype(dtype));
}

}  // namespace

at::Tensor choose_rows(const at::Tensor& rows, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                       const at::Tensor&) {
  const at::Tensor nulls = at::empty_like(rows);
  return at::empty_like(rows);
}

at::Tensor on_device_of_cpu(const at::Tensor& host_values, at::Device device) {
  return at::empty(host_values.sizes(), host_values.options().device(device));
}

at::Tensor product_of_cpu(ProductOperands of) {
  at::Tensor result = aten_product(of);
  of.right.reset();  // the caller has it no longer, but for that of kAffine
  const int64_t k = of.left.numel() / std::max<int64_t>(result.size(0), 1);
  const int64_t bytes =
      cpu::product_scratch_bytes(of.product, of.left.scalar_type(), result.size(0), result.size(1), k);
  at::empty({bytes}, of.left.options().dtype(at::kByte));
  return result;
}

at::Tensor mixed_sum_of_cpu(const at::Tensor& a, const at::Tensor& b) {
  const at::ScalarType dtype = at::promote_types(a.scalar_type(), b.scalar_type());
  const at::Tensor scratch[] = {wide_copy(a, dtype), wide_copy(b, dtype)};
  return a + b;
}

void mixed_add_of_cpu(const at::Tensor& sum, const at::Tensor& term) {
  const at::Tensor scratch = wide_copy(term, sum.scalar_type());
  sum.add_(term);
}

void adamw_8bit_blocks(const at::Tensor& weights, const at::Tensor&, const Moment8bit&, const Moment8bit&,
                       const AdamWStep&) {
  std::array<at::Tensor, 5> temporaries;
  for (at::Tensor& temporary : temporaries) temporary = at::empty(weights.sizes(), weights.options());
}

}  // namespace kiln::ops::planned
