// adaLN: LayerNorm without affine, then * (1 + scale) + shift. One pass over memory also does the gated
// residual before it, and in backward adds the gradient that goes around it.
#include "ops/cuda/kernels.h"
#include "ops/cuda/rows.cuh"

namespace kiln::ops::cuda {
namespace {

constexpr size_t kRowsPerBlock = 16;  // in forward
constexpr int kRows = 4;              // at once in forward

// How many rows backward has in registers at once, and for what blocks it is compiled. Each row takes 32
// floats of a thread, and the sums and factors 40 more. Up to 1536 columns two blocks of 192 threads leave a
// thread 168 registers; wider rows leave it 128, so these take one row at once. tools/cuda_registers fails if
// one of them spills.
struct NarrowGrad {
  static constexpr int kRows = 2, kMostThreads = 192, kLeastBlocks = 2;
};
struct WideGrad {
  static constexpr int kRows = 1, kMostThreads = kMostRowThreads, kLeastBlocks = 1;
};

// x += gate * y, rounded to the dtype in which x is stored.
template <bool kPacked, class TX, class TLow>
__device__ void add_branch(const TLow* y, const float (&gate)[kRowElements], int count,
                           float (&x)[kRowElements], TX* to) {
  float branch[kRowElements];
  load_columns<kPacked>(y, count, branch);
#pragma unroll
  for (int k = 0; k < kRowElements; ++k) {
    x[k] = fmaf(gate[k], branch[k], x[k]);
  }
  store_columns<kPacked>(x, count, to);
}

// The norm reads x_in, or with a branch x_out = x_in + gate * y, which is written first.
template <class TX, class TLow, bool kPacked>
__global__ void __launch_bounds__(kMostRowThreads)
    adaln_kernel(AdalnArgs args, GatedResidualArgs branch, const TX* x_in, TX* x_out, TLow* out) {
  __shared__ float sum_buffer[kMostRowWarps][kRows], square_buffer[kMostRowWarps][kRows];
  const RowPosition at(args.rows_per_batch, kRowsPerBlock, args.width);
  const bool has_branch = branch.y != nullptr;
  float shift[kRowElements], factor[kRowElements], gate[kRowElements];
  load_modulation(args.shift, args.modulation_dtype, args.shift_stride, at, 0, shift);
  load_modulation(args.scale, args.modulation_dtype, args.scale_stride, at, 1, factor);
  if (has_branch) {
    load_modulation(branch.gate, branch.gate_dtype, branch.gate_stride, at, 0, gate);
  }
  for (size_t first = at.first_row; first < at.end_row; first += kRows) {
    float x[kRows][kRowElements], sums[kRows], squares[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const size_t i = (first + r) * args.width + at.column;
      load_columns<kPacked>(x_in + i, first + r < at.end_row ? at.count : 0, x[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (has_branch) {
        const size_t i = (first + r) * args.width + at.column;
        add_branch<kPacked>(static_cast<const TLow*>(branch.y) + i, gate,
                            first + r < at.end_row ? at.count : 0, x[r], x_out + i);
      }
      sums[r] = 0;
#pragma unroll
      for (int k = 0; k < kRowElements; ++k) {
        sums[r] += x[r][k];
      }
    }
    block_sums(sums, sum_buffer);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r] /= args.width;  // the mean
      squares[r] = 0;
#pragma unroll
      for (int k = 0; k < kRowElements; ++k) {
        x[r][k] = k < at.count ? x[r][k] - sums[r] : 0.0f;
        squares[r] += x[r][k] * x[r][k];
      }
    }
    block_sums(squares, square_buffer);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const size_t row = first + r;
      if (row < at.end_row) {
        const float rstd = 1 / sqrtf(squares[r] / args.width + args.eps);
#pragma unroll
        for (int k = 0; k < kRowElements; ++k) {
          x[r][k] = x[r][k] * rstd * factor[k] + shift[k];
        }
        store_columns<kPacked>(x[r], at.count, out + row * args.width + at.column);
        if (threadIdx.x == 0) {
          args.mean[row] = sums[r];
          args.rstd[row] = rstd;
        }
      }
    }
  }
}

// With xhat = (x - mean) rstd and h = grad (1 + scale):  dx = rstd (h - mean(h) - xhat mean(h xhat)), plus
// the gradient that goes around the norm. Through the branch, dy = gate dx. `partials`
// (2 or 3, batch, P, width) are d shift, d scale and d gate, summed over the rows of a block.
template <class Grad, class TX, class TLow, bool kPacked>
__global__ void __launch_bounds__(Grad::kMostThreads, Grad::kLeastBlocks)
    adaln_grad_kernel(AdalnArgs args, GatedResidualArgs branch, const TLow* grads, const TX* around, TX* dx,
                      TLow* dy, float* partials, size_t rows_per_partial) {
  constexpr int kGradRows = Grad::kRows;
  __shared__ float buffers[2][Grad::kMostThreads / 32][2 * kGradRows];
  const RowPosition at(args.rows_per_batch, rows_per_partial, args.width);
  const bool has_branch = branch.y != nullptr;
  float factor[kRowElements], gate[kRowElements];
  float dshift[kRowElements] = {}, dscale[kRowElements] = {}, dgate[kRowElements] = {};
  load_modulation(args.scale, args.modulation_dtype, args.scale_stride, at, 1, factor);
  if (has_branch) {
    load_modulation(branch.gate, branch.gate_dtype, branch.gate_stride, at, 0, gate);
  }
  int parity = 0;
  for (size_t first = at.first_row; first < at.end_row; first += kGradRows, parity ^= 1) {
    // All loads start before the barrier.
    float g[kGradRows][kRowElements], x[kGradRows][kRowElements], rest[kGradRows][kRowElements],
        y[kGradRows][kRowElements], rstd[kGradRows], sums[2 * kGradRows];
#pragma unroll
    for (int r = 0; r < kGradRows; ++r) {
      const size_t row = first + r, i = row * args.width + at.column;
      const int count = row < at.end_row ? at.count : 0;
      load_columns<kPacked>(grads + i, count, g[r]);
      load_columns<kPacked>(static_cast<const TX*>(args.x) + i, count, x[r]);
      load_columns<kPacked>(around + i, around == nullptr ? 0 : count, rest[r]);
      load_columns<kPacked>(static_cast<const TLow*>(branch.y) + i, has_branch ? count : 0, y[r]);
    }
#pragma unroll
    for (int r = 0; r < kGradRows; ++r) {
      const size_t row = min(first + r, at.end_row - 1);
      const float mean = args.mean[row];
      rstd[r] = args.rstd[row];
      sums[2 * r] = sums[2 * r + 1] = 0;
#pragma unroll
      for (int k = 0; k < kRowElements; ++k) {
        x[r][k] = (x[r][k] - mean) * rstd[r];
        dshift[k] += g[r][k];
        dscale[k] += g[r][k] * x[r][k];
        g[r][k] *= factor[k];
        sums[2 * r] += g[r][k];
        sums[2 * r + 1] += g[r][k] * x[r][k];
      }
    }
    block_sums(sums, buffers[parity]);
#pragma unroll
    for (int r = 0; r < kGradRows; ++r) {
      const size_t i = (first + r) * args.width + at.column;
      const int count = first + r < at.end_row ? at.count : 0;
      const float mean_h = sums[2 * r] / args.width, mean_h_xhat = sums[2 * r + 1] / args.width;
#pragma unroll
      for (int k = 0; k < kRowElements; ++k) {
        x[r][k] = rstd[r] * (g[r][k] - mean_h - x[r][k] * mean_h_xhat) + rest[r][k];
      }
      store_columns<kPacked>(x[r], count, dx + i);
      if (has_branch && count > 0) {
#pragma unroll
        for (int k = 0; k < kRowElements; ++k) {
          dgate[k] += x[r][k] * y[r][k];
          y[r][k] = x[r][k] * gate[k];
        }
        store_columns<kPacked>(y[r], count, dy + i);
      }
    }
  }
  float* to = partials + static_cast<size_t>(blockIdx.x) * args.width + at.column;
  const size_t plane = static_cast<size_t>(gridDim.x) * args.width;
#pragma unroll
  for (int k = 0; k < kRowElements; ++k) {
    if (k < at.count) {
      to[k] = dshift[k];
      to[plane + k] = dscale[k];
      if (has_branch) {
        to[2 * plane + k] = dgate[k];
      }
    }
  }
}

}  // namespace
}  // namespace kiln::ops::cuda

using namespace kiln::ops::cuda;  // NOLINT: the C interface below is this file's only other content

int kiln_cuda_adaln(const kiln::ops::AdalnArgs* args, const kiln::ops::GatedResidualArgs* branch,
                    const void* x_in, void* x_out, void* out, kiln::Dtype out_dtype, size_t batch,
                    void* stream) {
  const size_t width = args->width;
  const bool packed = is_packable(x_in, width) && is_packable(x_out, width) && is_packable(out, width) &&
                      is_packable(branch->y, width);
  with_row_types(args->x_dtype, out_dtype, packed, [&](auto x, auto low, auto is_packed) {
    using TX = decltype(x);
    using TLow = decltype(low);
    launch(adaln_kernel<TX, TLow, decltype(is_packed)::value>,
           dim3(batch * blocks_for(args->rows_per_batch, kRowsPerBlock)), dim3(row_threads(width)),
           static_cast<cudaStream_t>(stream), *args, *branch, static_cast<const TX*>(x_in),
           static_cast<TX*>(x_out), static_cast<TLow*>(out));
  });
  return last_error();
}

int kiln_cuda_adaln_grad(const kiln::ops::AdalnArgs* args, const kiln::ops::GatedResidualArgs* branch,
                         const kiln::ops::AdalnGrads* grads, kiln::Dtype low_dtype, float* partials,
                         size_t rows_per_partial, size_t batch, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const size_t width = args->width;
  const unsigned num_partials = blocks_for(args->rows_per_batch, rows_per_partial);
  const bool packed = is_packable(args->x, width) && is_packable(branch->y, width) &&
                      is_packable(grads->out, width) && is_packable(grads->around, width) &&
                      is_packable(grads->x, width) && is_packable(grads->y, width);
  with_row_types(args->x_dtype, low_dtype, packed, [&](auto x, auto low, auto is_packed) {
    using TX = decltype(x);
    using TLow = decltype(low);
    constexpr bool kPacked = decltype(is_packed)::value;
    const bool is_narrow = row_threads(width) <= NarrowGrad::kMostThreads;
    launch(is_narrow ? adaln_grad_kernel<NarrowGrad, TX, TLow, kPacked>
                     : adaln_grad_kernel<WideGrad, TX, TLow, kPacked>,
           dim3(batch * num_partials), dim3(row_threads(width)), s, *args, *branch,
           static_cast<const TLow*>(grads->out), static_cast<const TX*>(grads->around),
           static_cast<TX*>(grads->x), static_cast<TLow*>(grads->y), partials, rows_per_partial);
  });
  const ColumnSums<2> modulation{{grads->shift, grads->scale}};
  sum_columns(partials, num_partials, width, batch, modulation, args->modulation_dtype, s);
  if (branch->y != nullptr) {
    sum_columns(partials + 2 * batch * num_partials * width, num_partials, width, batch,
                ColumnSums<1>{{grads->gate}}, branch->gate_dtype, s);
  }
  return last_error();
}
