#include "ops/mixed_sum.h"

#include "core/aten.h"
#include "ops/kernels.h"

namespace kiln::ops {
namespace {

// Stands for the kernel's wider copy of `term` in a dry run of a CPU; undefined elsewhere.
at::Tensor copy_scratch(const at::Tensor& term, at::ScalarType dtype) {
  const bool copies = term.is_meta() && computes_on_cpu(term) && term.scalar_type() != dtype;
  return copies ? at::empty(term.sizes(), term.options().dtype(dtype)) : at::Tensor();
}

}  // namespace

at::Tensor mixed_sum(const at::Tensor& a, const at::Tensor& b) {
  const at::ScalarType dtype = at::promote_types(a.scalar_type(), b.scalar_type());
  const at::Tensor scratch[] = {copy_scratch(a, dtype), copy_scratch(b, dtype)};
  return a + b;
}

void mixed_add_(at::Tensor& sum, const at::Tensor& term) {
  const at::Tensor scratch = copy_scratch(term, sum.scalar_type());
  sum.add_(term);
}

}  // namespace kiln::ops
