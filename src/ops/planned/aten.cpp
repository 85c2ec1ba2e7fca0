// ATen's functions in dry runs.
#include <algorithm>

#include "core/aten.h"
#include "ops/cpu/onednn_scratch.h"
#include "ops/matrix_products.h"
#include "ops/planned/planned.h"

namespace kiln::ops::planned {
namespace {

at::Tensor like_if(bool wanted, const at::Tensor& tensor) {
  return wanted ? at::empty_like(tensor) : at::Tensor();
}

// Undefined if a sum in `dtype` makes no copy.
at::Tensor wide_copy(const at::Tensor& term, at::ScalarType dtype) {
  return term.scalar_type() == dtype ? at::Tensor() : at::empty(term.sizes(), term.options().dtype(dtype));
}

}  // namespace

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

at::Tensor embedding(const at::Tensor& table, const at::Tensor& ids) {
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(table.size(1));
  return at::empty(shape, table.options());
}

at::Tensor embedding_backward(const at::Tensor& grad, const at::Tensor&, int64_t num_rows) {
  return at::empty({num_rows, grad.size(-1)}, grad.options());
}

at::Tensor product_of_cpu(ProductOperands of) {
  at::Tensor result = aten_product(of);
  of.right.reset();  // the caller has it no longer, but for that of kAffine
  const int64_t k = of.left.numel() / std::max<int64_t>(result.size(0), 1);
  const int64_t bytes = cpu::product_scratch_bytes(of.product, of.left.scalar_type(), result.size(0),
                                                   result.size(1), k);
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
