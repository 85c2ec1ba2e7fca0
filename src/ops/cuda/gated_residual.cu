// x + gate * y.
#include "ops/cuda/kernels.h"
#include "ops/cuda/rows.cuh"

namespace kiln::ops::cuda {
namespace {

constexpr size_t kRowsPerBlock = 16;  // in forward
constexpr int kRows = 4;              // at once
// Without a number of blocks ptxas aims at fewer registers than the rows need, and spills on some GPUs.
constexpr int kLeastBlocks = 1;

template <class TX, class TY, bool kPacked>
__global__ void __launch_bounds__(kMostRowThreads, kLeastBlocks)
    gated_residual_kernel(GatedResidualArgs args, const TX* x, TX* out) {
  const RowPosition at(args.rows_per_batch, kRowsPerBlock, args.width);
  float gate[kRowElements];
  load_modulation(args.gate, args.gate_dtype, args.gate_stride, at, 0, gate);
  for (size_t first = at.first_row; first < at.end_row; first += kRows) {
    float sum[kRows][kRowElements], y[kRows][kRowElements];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const size_t i = (first + r) * args.width + at.column;
      const int count = first + r < at.end_row ? at.count : 0;
      load_columns<kPacked>(x + i, count, sum[r]);
      load_columns<kPacked>(static_cast<const TY*>(args.y) + i, count, y[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kRowElements; ++k) {
        sum[r][k] = fmaf(gate[k], y[r][k], sum[r][k]);
      }
      store_columns<kPacked>(sum[r], first + r < at.end_row ? at.count : 0,
                             out + (first + r) * args.width + at.column);
    }
  }
}

template <class TGrad, class TY, bool kPacked>
__global__ void __launch_bounds__(kMostRowThreads, kLeastBlocks)
    gated_residual_grad_kernel(GatedResidualArgs args, const TGrad* grads, TY* dy, float* partials,
                               size_t rows_per_partial) {
  const RowPosition at(args.rows_per_batch, rows_per_partial, args.width);
  float gate[kRowElements], dgate[kRowElements] = {};
  load_modulation(args.gate, args.gate_dtype, args.gate_stride, at, 0, gate);
  for (size_t first = at.first_row; first < at.end_row; first += kRows) {
    float g[kRows][kRowElements], y[kRows][kRowElements];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const size_t i = (first + r) * args.width + at.column;
      const int count = first + r < at.end_row ? at.count : 0;
      load_columns<kPacked>(grads + i, count, g[r]);
      load_columns<kPacked>(static_cast<const TY*>(args.y) + i, count, y[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kRowElements; ++k) {
        dgate[k] += g[r][k] * y[r][k];
        g[r][k] *= gate[k];
      }
      store_columns<kPacked>(g[r], first + r < at.end_row ? at.count : 0,
                             dy + (first + r) * args.width + at.column);
    }
  }
#pragma unroll
  for (int k = 0; k < kRowElements; ++k) {
    if (k < at.count) {
      partials[static_cast<size_t>(blockIdx.x) * args.width + at.column + k] = dgate[k];
    }
  }
}

}  // namespace
}  // namespace kiln::ops::cuda

using namespace kiln::ops::cuda;  // NOLINT: the C interface below is this file's only other content

int kiln_cuda_gated_residual(const kiln::ops::GatedResidualArgs* args, const void* x, void* out,
                             kiln::Dtype x_dtype, size_t batch, void* stream) {
  const size_t width = args->width;
  const bool packed = is_packable(x, width) && is_packable(out, width) && is_packable(args->y, width);
  with_row_types(x_dtype, args->y_dtype, packed, [&](auto residual, auto branch, auto is_packed) {
    using TX = decltype(residual);
    launch(gated_residual_kernel<TX, decltype(branch), decltype(is_packed)::value>,
           dim3(batch * blocks_for(args->rows_per_batch, kRowsPerBlock)), dim3(row_threads(width)),
           static_cast<cudaStream_t>(stream), *args, static_cast<const TX*>(x), static_cast<TX*>(out));
  });
  return last_error();
}

int kiln_cuda_gated_residual_grad(const kiln::ops::GatedResidualArgs* args, const void* grad,
                                  kiln::Dtype grad_dtype, void* dy, void* dgate, float* partials,
                                  size_t rows_per_partial, size_t batch, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const size_t width = args->width;
  const unsigned num_partials = blocks_for(args->rows_per_batch, rows_per_partial);
  const bool packed = is_packable(grad, width) && is_packable(dy, width) && is_packable(args->y, width);
  with_row_types(grad_dtype, args->y_dtype, packed, [&](auto residual, auto branch, auto is_packed) {
    using TGrad = decltype(residual);
    using TY = decltype(branch);
    launch(gated_residual_grad_kernel<TGrad, TY, decltype(is_packed)::value>, dim3(batch * num_partials),
           dim3(row_threads(width)), s, *args, static_cast<const TGrad*>(grad), static_cast<TY*>(dy),
           partials, rows_per_partial);
  });
  sum_columns(partials, num_partials, width, batch, ColumnSums<1>{{dgate}}, args->gate_dtype, s);
  return last_error();
}
