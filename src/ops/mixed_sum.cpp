#include "ops/mixed_sum.h"

#include "core/aten.h"
#include "ops/kernels.h"
#include "ops/planned/planned.h"

namespace kiln::ops {
namespace {

at::Tensor aten_sum(const at::Tensor& a, const at::Tensor& b) { return a + b; }
void aten_add(const at::Tensor& sum, const at::Tensor& term) { sum.add_(term); }

constexpr Kernel<decltype(aten_sum)> kMixedSum{
    .cpu = aten_sum, .cuda = aten_sum, .planned_cpu = planned::mixed_sum_of_cpu, .planned_cuda = aten_sum};
constexpr Kernel<decltype(aten_add)> kMixedAdd{
    .cpu = aten_add, .cuda = aten_add, .planned_cpu = planned::mixed_add_of_cpu, .planned_cuda = aten_add};

}  // namespace

at::Tensor mixed_sum(const at::Tensor& a, const at::Tensor& b) { return kMixedSum.on(a)(a, b); }

void mixed_add_(at::Tensor& sum, const at::Tensor& term) { kMixedAdd.on(term)(sum, term); }

}  // namespace kiln::ops
