#include "ops/modulation.h"

#include <ATen/Parallel.h>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "core/threads/parallel_pieces.h"
#include "ops/cpu/kernels.h"
#include "ops/kernels.h"

namespace kiln::ops {

void check_modulation(const char* who, const char* name, const at::Tensor& x, const at::Tensor& rows) {
  if (x.dim() != 3) {
    fail(who, "x must have 3 dimensions (B, N, D) but has {}", x.dim());
  }
  if (rows.dim() != 2 || rows.size(0) != x.size(0) || rows.size(1) != x.size(2)) {
    fail(who, "{} must have shape [{}, {}] for x {}, got {}", name, x.size(0), x.size(2), c10::str(x.sizes()),
         c10::str(rows.sizes()));
  }
}

at::Tensor unit_stride_rows(const at::Tensor& rows) {
  return rows.size(1) == 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

at::Tensor partial_sums(std::vector<int64_t> leading, const at::Tensor& x) {
  const int64_t rows = computes_on_cuda(x) ? kRowsPerPartialOnGpu : kRowsPerPartial;
  leading.insert(leading.end(), {at::divup(x.size(1), rows), x.size(2)});
  return at::empty(leading, x.options().dtype(at::kFloat));
}

void sum_partials(const at::Tensor& partials, const at::Tensor& sums) {
  const int64_t batch = partials.size(0), count = partials.size(1), width = partials.size(2);
  const Dtype out_dtype = from_scalar_type(sums.scalar_type());
  const size_t row_bytes = width * dtype_size(out_dtype);
  const float* from = partials.const_data_ptr<float>();
  char* to = static_cast<char*>(sums.mutable_data_ptr());
  parallel_pieces(batch, 8, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      cpu::sum_partials(from + b * count * width, count, width, to + b * row_bytes, out_dtype, width);
    }
  });
}

GatedResidualArgs gated_residual_args(const at::Tensor& gate, const at::Tensor& y) {
  return {.gate = gate.const_data_ptr(),
          .gate_dtype = from_scalar_type(gate.scalar_type()),
          .gate_stride = static_cast<size_t>(gate.stride(0)),
          .y = y.const_data_ptr(),
          .y_dtype = from_scalar_type(y.scalar_type()),
          .rows_per_batch = static_cast<size_t>(y.size(1)),
          .width = static_cast<size_t>(y.size(2))};
}

void check_gated_residual(const char* who, const at::Tensor& x, const at::Tensor& gate, const at::Tensor& y) {
  check_modulation(who, "gate", x, gate);
  if (y.sizes() != x.sizes())
    fail(who, "y must have the shape of x {}, got {}", c10::str(x.sizes()), c10::str(y.sizes()));
}

}  // namespace kiln::ops
