// x + gate * y.
#include "ops/cuda/columns.cuh"
#include "ops/cuda/kernels.h"

namespace kiln::ops::cuda {
namespace {

constexpr int kWarps = 8;  // rows a block

template <class TX, class TY>
__global__ void gated_residual_kernel(GatedResidualArgs args, const TX* x, TX* out, size_t rows) {
  const size_t row = static_cast<size_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (row >= rows) {
    return;
  }
  const size_t gate_row = row / args.rows_per_batch * args.gate_stride;
  for (size_t j = threadIdx.x; j < args.width; j += 32) {
    const size_t i = row * args.width + j;
    const float gate = load_as(args.gate_dtype, args.gate, gate_row + j);
    narrow(fmaf(gate, widen(static_cast<const TY*>(args.y)[i]), widen(x[i])), out + i);
  }
}

template <class TGrad, class TY>
__global__ void gated_residual_grad_kernel(GatedResidualArgs args, const TGrad* grad, TY* dy, float* dgate,
                                           size_t rows_per_partial) {
  const ColumnPosition at(args.rows_per_batch, rows_per_partial);
  float sum = 0;
  if (at.column < args.width) {
    const float gate = load_as(args.gate_dtype, args.gate, blockIdx.z * args.gate_stride + at.column);
    for (size_t row = at.first_row + threadIdx.y; row < at.end_row; row += kRowLanes) {
      const size_t i = row * args.width + at.column;
      const float g = widen(grad[i]);
      narrow(g * gate, dy + i);
      sum += g * widen(static_cast<const TY*>(args.y)[i]);
    }
  }
  sum = sum_over_row_lanes(sum);
  if (threadIdx.y == 0 && at.column < args.width) {
    dgate[at.partial * args.width + at.column] = sum;
  }
}

}  // namespace
}  // namespace kiln::ops::cuda

using namespace kiln::ops::cuda;  // NOLINT: the C interface below is this file's only other content

int kiln_cuda_gated_residual(const kiln::ops::GatedResidualArgs* args, const void* x, void* out,
                             kiln::Dtype x_dtype, size_t rows, void* stream) {
  with_element(x_dtype, [&](auto residual) {
    using TX = decltype(residual);
    with_element(args->y_dtype, [&](auto branch) {
      gated_residual_kernel<TX, decltype(branch)>
          <<<blocks_for(rows, kWarps), dim3(32, kWarps), 0, static_cast<cudaStream_t>(stream)>>>(
              *args, static_cast<const TX*>(x), static_cast<TX*>(out), rows);
    });
  });
  return last_error();
}

int kiln_cuda_gated_residual_grad(const kiln::ops::GatedResidualArgs* args, const void* grad,
                                  kiln::Dtype grad_dtype, void* dy, void* dgate, float* partials,
                                  size_t rows_per_partial, size_t batch, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const size_t width = args->width;
  const unsigned num_partials = blocks_for(args->rows_per_batch, rows_per_partial);
  with_element(grad_dtype, [&](auto residual) {
    using TGrad = decltype(residual);
    with_element(args->y_dtype, [&](auto branch) {
      using TY = decltype(branch);
      gated_residual_grad_kernel<TGrad, TY>
          <<<dim3(blocks_for(width, kColumns), num_partials, batch), dim3(kColumns, kRowLanes), 0, s>>>(
              *args, static_cast<const TGrad*>(grad), static_cast<TY*>(dy), partials, rows_per_partial);
    });
  });
  sum_partials(partials, num_partials, width, batch, dgate, args->gate_dtype, s);
  return last_error();
}
