// adaLN: LayerNorm without affine, then * (1 + scale) + shift. One warp a row, which stays in the first-level
// cache between its passes.
#include "ops/cuda/columns.cuh"
#include "ops/cuda/kernels.h"

namespace kiln::ops::cuda {
namespace {

constexpr int kWarps = 8;  // rows a block

template <class TIn, class TOut>
__global__ void adaln_kernel(AdalnArgs args, TOut* out, size_t rows) {
  const size_t row = static_cast<size_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (row >= rows) {
    return;
  }
  const size_t batch = row / args.rows_per_batch;
  const TIn* x = static_cast<const TIn*>(args.x) + row * args.width;
  TOut* to = out + row * args.width;
  float sum = 0;
  for (size_t j = threadIdx.x; j < args.width; j += 32) {
    sum += widen(x[j]);
  }
  const float mean = warp_sum(sum) / args.width;
  float squares = 0;
  for (size_t j = threadIdx.x; j < args.width; j += 32) {
    const float d = widen(x[j]) - mean;
    squares += d * d;
  }
  const float rstd = 1 / sqrtf(warp_sum(squares) / args.width + args.eps);
  for (size_t j = threadIdx.x; j < args.width; j += 32) {
    const float factor = 1 + load_as(args.modulation_dtype, args.scale, batch * args.scale_stride + j);
    const float shift = load_as(args.modulation_dtype, args.shift, batch * args.shift_stride + j);
    narrow((widen(x[j]) - mean) * rstd * factor + shift, to + j);
  }
  if (threadIdx.x == 0) {
    args.mean[row] = mean;
    args.rstd[row] = rstd;
  }
}

// With xhat = (x - mean) rstd and h = grad (1 + scale):  dx = rstd (h - mean(h) - xhat mean(h xhat)).
template <class TIn, class TGrad>
__global__ void adaln_dx_kernel(AdalnArgs args, const TGrad* grads, TIn* dx, size_t rows) {
  const size_t row = static_cast<size_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (row >= rows) {
    return;
  }
  const size_t scale_row = row / args.rows_per_batch * args.scale_stride;
  const TIn* x = static_cast<const TIn*>(args.x) + row * args.width;
  const TGrad* grad = grads + row * args.width;
  const float mean = args.mean[row], rstd = args.rstd[row];
  float sum = 0, sum_xhat = 0;
  for (size_t j = threadIdx.x; j < args.width; j += 32) {
    const float h = widen(grad[j]) * (1 + load_as(args.modulation_dtype, args.scale, scale_row + j));
    sum += h;
    sum_xhat += h * (widen(x[j]) - mean) * rstd;
  }
  const float mean_h = warp_sum(sum) / args.width, mean_h_xhat = warp_sum(sum_xhat) / args.width;
  for (size_t j = threadIdx.x; j < args.width; j += 32) {
    const float h = widen(grad[j]) * (1 + load_as(args.modulation_dtype, args.scale, scale_row + j));
    const float xhat = (widen(x[j]) - mean) * rstd;
    narrow(rstd * (h - mean_h - xhat * mean_h_xhat), dx + row * args.width + j);
  }
}

template <class TIn, class TGrad>
__global__ void adaln_columns_kernel(AdalnArgs args, const TGrad* grads, float* dshift, float* dscale,
                                     size_t rows_per_partial) {
  const ColumnPosition at(args.rows_per_batch, rows_per_partial);
  float shift = 0, scale = 0;
  if (at.column < args.width) {
    for (size_t row = at.first_row + threadIdx.y; row < at.end_row; row += kRowLanes) {
      const size_t i = row * args.width + at.column;
      const float g = widen(grads[i]);
      shift += g;
      scale += g * (widen(static_cast<const TIn*>(args.x)[i]) - args.mean[row]) * args.rstd[row];
    }
  }
  shift = sum_over_row_lanes(shift);
  scale = sum_over_row_lanes(scale);
  if (threadIdx.y == 0 && at.column < args.width) {
    dshift[at.partial * args.width + at.column] = shift;
    dscale[at.partial * args.width + at.column] = scale;
  }
}

}  // namespace
}  // namespace kiln::ops::cuda

using namespace kiln::ops::cuda;  // NOLINT: the C interface below is this file's only other content

int kiln_cuda_adaln(const kiln::ops::AdalnArgs* args, void* out, kiln::Dtype out_dtype, size_t rows,
                    void* stream) {
  with_element(args->x_dtype, [&](auto in) {
    with_element(out_dtype, [&](auto to) {
      using TOut = decltype(to);
      adaln_kernel<decltype(in)>
          <<<blocks_for(rows, kWarps), dim3(32, kWarps), 0, static_cast<cudaStream_t>(stream)>>>(
              *args, static_cast<TOut*>(out), rows);
    });
  });
  return last_error();
}

int kiln_cuda_adaln_grad(const kiln::ops::AdalnArgs* args, const void* grad, kiln::Dtype grad_dtype, void* dx,
                         void* dshift, void* dscale, float* partials, size_t rows_per_partial, size_t batch,
                         void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const size_t rows = batch * args->rows_per_batch, width = args->width;
  const unsigned num_partials = blocks_for(args->rows_per_batch, rows_per_partial);
  float* dscale_partials = partials + batch * num_partials * width;
  with_element(args->x_dtype, [&](auto in) {
    using TIn = decltype(in);
    with_element(grad_dtype, [&](auto g) {
      const auto* grads = static_cast<const decltype(g)*>(grad);
      adaln_dx_kernel<<<blocks_for(rows, kWarps), dim3(32, kWarps), 0, s>>>(*args, grads,
                                                                            static_cast<TIn*>(dx), rows);
      adaln_columns_kernel<TIn>
          <<<dim3(blocks_for(width, kColumns), num_partials, batch), dim3(kColumns, kRowLanes), 0, s>>>(
              *args, grads, partials, dscale_partials, rows_per_partial);
    });
  });
  sum_partials(partials, num_partials, width, batch, dshift, args->modulation_dtype, s);
  sum_partials(dscale_partials, num_partials, width, batch, dscale, args->modulation_dtype, s);
  return last_error();
}
