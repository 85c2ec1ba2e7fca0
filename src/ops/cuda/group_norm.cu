// GroupNorm with affine, then SiLU, of channels-last pictures: a pixel is a row of channels. Forward reads x
// for the moments of the groups, then to normalise it. Backward reads x and the gradient for the sums of the
// channels, then for the gradient of x.
#include "ops/cuda/kernels.h"
#include "ops/cuda/rows.cuh"

namespace kiln::ops::cuda {
namespace {

constexpr int kPixels = 4;      // at once in forward
constexpr int kGradPixels = 2;  // at once in backward
constexpr unsigned kGroupThreads = 128;

// The fast exponential and division, as in gelu.cu.
__device__ float sigmoid(float y) { return __fdividef(1.0f, 1 + __expf(-y)); }

__device__ unsigned group_channels(const GroupNormArgs& args) {
  return static_cast<unsigned>(args.channels) / static_cast<unsigned>(args.num_groups);
}

// Loads the values (batch, groups) of the groups of a thread's channels.
__device__ void load_groups(const float* values, const GroupNormArgs& args, const RowPosition& at,
                            float (&to)[kRowElements]) {
  const unsigned channels = group_channels(args);
#pragma unroll
  for (int k = 0; k < kRowElements; ++k) {
    const unsigned group = (static_cast<unsigned>(at.column) + k) / channels;
    to[k] = k < at.count ? values[at.batch * args.num_groups + group] : 0.0f;
  }
}

// The mean and the sum of squares around it of this block's pixels, for each group: partials (2, B, P,
// groups). Sums go around a channel's first pixel and a group's first channel, so that a mean far from zero
// costs no digits.
template <class T, bool kPacked>
__global__ void __launch_bounds__(kMostRowThreads) moments_kernel(GroupNormArgs args, float* partials) {
  __shared__ float means[kWidestRow], squares[kWidestRow];
  const RowPosition at(args.pixels, args.pixels_per_block, args.channels);
  const T* x = static_cast<const T*>(args.x) + at.column;
  float centre[kRowElements], sums[kRowElements] = {}, around[kRowElements] = {};
  load_columns<kPacked>(x + at.first_row * args.channels, at.count, centre);
  for (size_t first = at.first_row; first < at.end_row; first += kPixels) {
    float values[kPixels][kRowElements];
#pragma unroll
    for (int r = 0; r < kPixels; ++r) {
      load_columns<kPacked>(x + (first + r) * args.channels, first + r < at.end_row ? at.count : 0,
                            values[r]);
    }
#pragma unroll
    for (int r = 0; r < kPixels; ++r) {
#pragma unroll
      for (int k = 0; k < kRowElements; ++k) {
        const float d = first + r < at.end_row ? values[r][k] - centre[k] : 0.0f;
        sums[k] += d;
        around[k] += d * d;
      }
    }
  }
  const float num_pixels = static_cast<float>(at.end_row - at.first_row);
#pragma unroll
  for (int k = 0; k < kRowElements; ++k) {
    if (k < at.count) {
      means[at.column + k] = centre[k] + sums[k] / num_pixels;
      squares[at.column + k] = around[k] - sums[k] * sums[k] / num_pixels;
    }
  }
  __syncthreads();
  const unsigned channels = group_channels(args);
  const size_t plane = static_cast<size_t>(gridDim.x) * args.num_groups;
  for (unsigned group = threadIdx.x; group < args.num_groups; group += blockDim.x) {
    const float shift = means[group * channels];
    float sum = 0, squares_between = 0, squares_within = 0;
    for (unsigned c = group * channels; c < (group + 1) * channels; ++c) {
      const float d = means[c] - shift;
      sum += d;
      squares_between += d * d;
      squares_within += squares[c];
    }
    const size_t i = static_cast<size_t>(blockIdx.x) * args.num_groups + group;
    partials[i] = shift + sum / channels;
    partials[plane + i] = squares_within + num_pixels * (squares_between - sum * sum / channels);
  }
}

// Joins the moments of all blocks of a picture: a warp for each (batch, group).
__global__ void __launch_bounds__(kGroupThreads)
    statistics_kernel(GroupNormArgs args, const float* partials, size_t num_partials, size_t batch) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * kGroupThreads + threadIdx.x) / 32;
  if (i >= batch * args.num_groups) {
    return;
  }
  const float* means = partials + i / args.num_groups * num_partials * args.num_groups + i % args.num_groups;
  const float* squares = means + batch * num_partials * args.num_groups;
  const float shift = means[0];
  float sum = 0, squares_between = 0, squares_within = 0;
  for (size_t p = threadIdx.x % 32; p < num_partials; p += 32) {
    const float pixels =
        static_cast<float>(min(args.pixels_per_block, args.pixels - p * args.pixels_per_block));
    const float d = means[p * args.num_groups] - shift;
    sum += pixels * d;
    squares_between += pixels * d * d;
    squares_within += squares[p * args.num_groups];
  }
  sum = warp_sum(sum);
  squares_between = warp_sum(squares_between);
  squares_within = warp_sum(squares_within);
  if (threadIdx.x % 32 == 0) {
    const float pixels = static_cast<float>(args.pixels);
    float variance = (squares_within / group_channels(args) + squares_between - sum * sum / pixels) / pixels;
    variance = variance < 0 ? 0.0f : variance;  // by rounding; NaN stays NaN
    args.mean[i] = shift + sum / pixels;
    args.rstd[i] = 1 / sqrtf(variance + args.eps);
  }
}

template <class T, bool kPacked>
__global__ void __launch_bounds__(kMostRowThreads) normalise_kernel(GroupNormArgs args, T* out) {
  const RowPosition at(args.pixels, args.pixels_per_block, args.channels);
  const T* x = static_cast<const T*>(args.x);
  float mean[kRowElements], factor[kRowElements], weight[kRowElements], bias[kRowElements];
  load_groups(args.mean, args, at, mean);
  load_groups(args.rstd, args, at, factor);
  load_modulation(args.weight, args.affine_dtype, 0, at, 0, weight);
  load_modulation(args.bias, args.affine_dtype, 0, at, 0, bias);
#pragma unroll
  for (int k = 0; k < kRowElements; ++k) {
    factor[k] *= weight[k];
  }
  for (size_t first = at.first_row; first < at.end_row; first += kPixels) {
    float values[kPixels][kRowElements];
#pragma unroll
    for (int r = 0; r < kPixels; ++r) {
      const size_t i = (first + r) * args.channels + at.column;
      load_columns<kPacked>(x + i, first + r < at.end_row ? at.count : 0, values[r]);
    }
#pragma unroll
    for (int r = 0; r < kPixels; ++r) {
#pragma unroll
      for (int k = 0; k < kRowElements; ++k) {
        const float y = (values[r][k] - mean[k]) * factor[k] + bias[k];
        values[r][k] = args.silu ? y * sigmoid(y) : y;
      }
      store_columns<kPacked>(values[r], first + r < at.end_row ? at.count : 0,
                             out + (first + r) * args.channels + at.column);
    }
  }
}

// What backward knows of a thread's channels.
struct GradChannels {
  float mean[kRowElements], rstd[kRowElements], weight[kRowElements], bias[kRowElements];

  __device__ GradChannels(const GroupNormArgs& args, const RowPosition& at) {
    load_groups(args.mean, args, at, mean);
    load_groups(args.rstd, args, at, rstd);
    load_modulation(args.weight, args.affine_dtype, 0, at, 0, weight);
    load_modulation(args.bias, args.affine_dtype, 0, at, 0, bias);
  }

  // Turns x into xhat = (x - mean) rstd, and the gradient of the result into that of y = xhat weight + bias:
  // with s = 1 / (1 + exp(-y)), d(y s)/dy = s (1 + y (1 - s)).
  __device__ void before_silu(bool silu, float (&x)[kRowElements], float (&grad)[kRowElements]) const {
#pragma unroll
    for (int k = 0; k < kRowElements; ++k) {
      x[k] = (x[k] - mean[k]) * rstd[k];
      if (silu) {
        const float y = x[k] * weight[k] + bias[k], s = sigmoid(y);
        grad[k] *= s * (1 + y * (1 - s));
      }
    }
  }
};

// The sums of this block's pixels, for each channel, of the gradient of y and of that times xhat: partials
// (2, B, P, channels).
template <class T, bool kPacked>
__global__ void __launch_bounds__(kMostRowThreads)
    channel_sums_kernel(GroupNormArgs args, const T* grads, float* partials) {
  const RowPosition at(args.pixels, args.pixels_per_block, args.channels);
  const GradChannels channels(args, at);
  float dbias[kRowElements] = {}, dweight[kRowElements] = {};
  for (size_t first = at.first_row; first < at.end_row; first += kGradPixels) {
    float x[kGradPixels][kRowElements], g[kGradPixels][kRowElements];
#pragma unroll
    for (int r = 0; r < kGradPixels; ++r) {
      const size_t i = (first + r) * args.channels + at.column;
      const int count = first + r < at.end_row ? at.count : 0;
      load_columns<kPacked>(static_cast<const T*>(args.x) + i, count, x[r]);
      load_columns<kPacked>(grads + i, count, g[r]);
    }
#pragma unroll
    for (int r = 0; r < kGradPixels; ++r) {
      channels.before_silu(args.silu, x[r], g[r]);
#pragma unroll
      for (int k = 0; k < kRowElements; ++k) {
        dbias[k] += g[r][k];
        dweight[k] += g[r][k] * x[r][k];
      }
    }
  }
  float* to = partials + static_cast<size_t>(blockIdx.x) * args.channels + at.column;
  const size_t plane = static_cast<size_t>(gridDim.x) * args.channels;
#pragma unroll
  for (int k = 0; k < kRowElements; ++k) {
    if (k < at.count) {
      to[k] = dbias[k];
      to[plane + k] = dweight[k];
    }
  }
}

// The means over a group of h = grad weight and of h xhat, from the sums of its channels (2, B, channels):
// a warp for each (batch, group).
__global__ void __launch_bounds__(kGroupThreads)
    group_means_kernel(GroupNormArgs args, const float* channel_sums, float* group_means, size_t batch) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * kGroupThreads + threadIdx.x) / 32;
  if (i >= batch * args.num_groups) {
    return;
  }
  const unsigned channels = group_channels(args);
  float h = 0, h_xhat = 0;
  for (unsigned c = threadIdx.x % 32; c < channels; c += 32) {
    const size_t channel = i % args.num_groups * channels + c;
    const float weight = load_as(args.affine_dtype, args.weight, channel);
    const float* sums = channel_sums + i / args.num_groups * args.channels + channel;
    h += weight * sums[0];
    h_xhat += weight * sums[batch * args.channels];
  }
  h = warp_sum(h);
  h_xhat = warp_sum(h_xhat);
  if (threadIdx.x % 32 == 0) {
    const float num_elements = static_cast<float>(args.pixels) * channels;
    group_means[i] = h / num_elements;
    group_means[batch * args.num_groups + i] = h_xhat / num_elements;
  }
}

// dx = rstd (h - mean(h) - xhat mean(h xhat)).
template <class T, bool kPacked>
__global__ void __launch_bounds__(kMostRowThreads)
    group_norm_grad_kernel(GroupNormArgs args, const T* grads, const float* group_means, size_t batch,
                           T* dx) {
  const RowPosition at(args.pixels, args.pixels_per_block, args.channels);
  const GradChannels channels(args, at);
  float mean_h[kRowElements], mean_h_xhat[kRowElements];
  load_groups(group_means, args, at, mean_h);
  load_groups(group_means + batch * args.num_groups, args, at, mean_h_xhat);
  for (size_t first = at.first_row; first < at.end_row; first += kGradPixels) {
    float x[kGradPixels][kRowElements], g[kGradPixels][kRowElements];
#pragma unroll
    for (int r = 0; r < kGradPixels; ++r) {
      const size_t i = (first + r) * args.channels + at.column;
      const int count = first + r < at.end_row ? at.count : 0;
      load_columns<kPacked>(static_cast<const T*>(args.x) + i, count, x[r]);
      load_columns<kPacked>(grads + i, count, g[r]);
    }
#pragma unroll
    for (int r = 0; r < kGradPixels; ++r) {
      channels.before_silu(args.silu, x[r], g[r]);
#pragma unroll
      for (int k = 0; k < kRowElements; ++k) {
        x[r][k] = channels.rstd[k] * (g[r][k] * channels.weight[k] - mean_h[k] - x[r][k] * mean_h_xhat[k]);
      }
      store_columns<kPacked>(x[r], first + r < at.end_row ? at.count : 0,
                             dx + (first + r) * args.channels + at.column);
    }
  }
}

unsigned group_blocks(const GroupNormArgs& args, size_t batch) {
  return blocks_for(batch * args.num_groups, kGroupThreads / 32);
}

// Calls body(x, packed) with a value of x's type and a std::bool_constant.
template <class Body>
void with_pictures(const GroupNormArgs& args, std::initializer_list<const void*> others, const Body& body) {
  bool packed = is_packable(args.x, args.channels);
  for (const void* other : others) packed = packed && is_packable(other, args.channels);
  with_element(args.dtype, [&](auto x) { packed ? body(x, std::true_type()) : body(x, std::false_type()); });
}

}  // namespace
}  // namespace kiln::ops::cuda

using namespace kiln::ops::cuda;  // NOLINT: the C interface below is this file's only other content

int kiln_cuda_group_norm(const kiln::ops::GroupNormArgs* args, void* out, float* partials, size_t batch,
                         void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const unsigned num_partials = blocks_for(args->pixels, args->pixels_per_block);
  const dim3 grid(batch * num_partials), block(row_threads(args->channels));
  with_pictures(*args, {out}, [&](auto x, auto is_packed) {
    using T = decltype(x);
    constexpr bool kPacked = decltype(is_packed)::value;
    launch(moments_kernel<T, kPacked>, grid, block, s, *args, partials);
    launch(statistics_kernel, dim3(group_blocks(*args, batch)), dim3(kGroupThreads), s, *args, partials,
           num_partials, batch);
    launch(normalise_kernel<T, kPacked>, grid, block, s, *args, static_cast<T*>(out));
  });
  return last_error();
}

int kiln_cuda_group_norm_grad(const kiln::ops::GroupNormArgs* args, const kiln::ops::GroupNormGradArgs* grads,
                              size_t batch, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const size_t channels = args->channels;
  const unsigned num_partials = blocks_for(args->pixels, args->pixels_per_block);
  const dim3 grid(batch * num_partials), block(row_threads(channels));
  with_pictures(*args, {grads->out, grads->x}, [&](auto x, auto is_packed) {
    using T = decltype(x);
    constexpr bool kPacked = decltype(is_packed)::value;
    const T* out = static_cast<const T*>(grads->out);
    launch(channel_sums_kernel<T, kPacked>, grid, block, s, *args, out, grads->partials);
    sum_columns(grads->partials, num_partials, channels, batch,
                ColumnSums<2>{{grads->channel_sums, grads->channel_sums + batch * channels}},
                kiln::Dtype::kF32, s);
    launch(group_means_kernel, dim3(group_blocks(*args, batch)), dim3(kGroupThreads), s, *args,
           grads->channel_sums, grads->group_means, batch);
    launch(group_norm_grad_kernel<T, kPacked>, grid, block, s, *args, out, grads->group_means, batch,
           static_cast<T*>(grads->x));
  });
  if (grads->weight != nullptr) {
    sum_columns(grads->channel_sums, batch, channels, 1, ColumnSums<2>{{grads->bias, grads->weight}},
                args->affine_dtype, s);
  }
  return last_error();
}
