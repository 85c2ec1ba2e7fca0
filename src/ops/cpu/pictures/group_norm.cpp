// GroupNorm and SiLU. Moments are taken in f32 over short pieces, around a centre near their mean, and
// combined in f64 (Chan et al. 1979). A mean far from zero therefore costs no digits.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/pictures/group_norm.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/cpu/sigmoid-inl.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

constexpr size_t kPiece = 4096;  // elements of a piece, which stays in the first-level cache
constexpr size_t kPiecePixels = 64;

struct Moments {
  double count = 0, mean = 0, m2 = 0;
  void add(double n, double other_mean, double other_m2) {
    const double total = count + n, delta = other_mean - mean;
    mean += delta * n / total;
    m2 += other_m2 + delta * delta * count * n / total;
    count = total;
  }
};

template <class T>
void add_piece(const T* x, size_t n, Moments* moments) {
  const size_t whole = n / (2 * kLanes) * (2 * kLanes);
  const float centre = sum_lanes(load(x, std::min(n, kLanes))) / std::min(n, kLanes);
  const Vec c = set(centre);
  Vec sum0 = set(0), sum1 = set(0), squares0 = set(0), squares1 = set(0);
  for (size_t i = 0; i < whole; i += 2 * kLanes) {
    const Vec a = hn::Sub(load(x + i), c), b = hn::Sub(load(x + i + kLanes), c);
    sum0 = hn::Add(sum0, a);
    sum1 = hn::Add(sum1, b);
    squares0 = hn::MulAdd(a, a, squares0);
    squares1 = hn::MulAdd(b, b, squares1);
  }
  double sum = sum_lanes(hn::Add(sum0, sum1)), squares = sum_lanes(hn::Add(squares0, squares1));
  for (size_t i = whole; i < n; i += kLanes) {
    const size_t count = std::min(kLanes, n - i);
    HWY_ALIGN float tail[kLanes];
    store(hn::Sub(load(x + i, count), c), tail);
    for (size_t j = 0; j < count; ++j) {
      sum += tail[j];
      squares += static_cast<double>(tail[j]) * tail[j];
    }
  }
  moments->add(n, centre + sum / n, squares - sum * sum / n);
}

template <bool kSilu, class T>
HWY_INLINE void affine(const T* x, T* out, size_t n, Vec factor, Vec offset) {
  for_each_vector(n, [=](size_t i, size_t count) HWY_ATTR {
    const Vec y = hn::MulAdd(load(x + i, count), factor, offset);
    store(kSilu ? silu(y) : y, out + i, count);
  });
}

void normalise_group(const void* x, void* out, Dtype dtype, const float* weight, const float* bias, float eps,
                     bool with_silu, size_t channels, size_t pixels) {
  with_element(dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    Moments moments;
    for (size_t i = 0; i < channels * pixels; i += kPiece) {
      add_piece(from + i, std::min(kPiece, channels * pixels - i), &moments);
    }
    const double rstd = 1 / std::sqrt(moments.m2 / moments.count + eps);
    for (size_t c = 0; c < channels; ++c) {
      const Vec factor = set(weight[c] * rstd), offset = set(bias[c] - weight[c] * rstd * moments.mean);
      with_silu ? affine<true>(from + c * pixels, to + c * pixels, pixels, factor, offset)
                : affine<false>(from + c * pixels, to + c * pixels, pixels, factor, offset);
    }
  });
}

template <class T>
void moments_of_channels(const T* x, double* mean, double* m2, size_t channels, size_t pixels) {
  std::vector<float> buffer(3 * channels);
  float *centre = buffer.data(), *sum = centre + channels, *squares = sum + channels;
  std::vector<Moments> moments(channels);
  for (size_t first = 0; first < pixels; first += kPiecePixels) {
    const size_t count = std::min(kPiecePixels, pixels - first);
    const T* piece = x + first * channels;
    for_each_vector(channels, [=](size_t c, size_t n) HWY_ATTR {
      const Vec k = load(piece + c, n);
      Vec s = set(0), q = set(0);
      for (size_t p = 1; p < count; ++p) {
        const Vec d = hn::Sub(load(piece + p * channels + c, n), k);
        s = hn::Add(s, d);
        q = hn::MulAdd(d, d, q);
      }
      store(k, centre + c, n);
      store(s, sum + c, n);
      store(q, squares + c, n);
    });
    for (size_t c = 0; c < channels; ++c) {
      const double s = sum[c];
      moments[c].add(count, centre[c] + s / count, squares[c] - s * s / count);
    }
  }
  for (size_t c = 0; c < channels; ++c) {
    mean[c] = moments[c].mean;
    m2[c] = moments[c].m2;
  }
}

void channel_moments_range(const void* x, Dtype dtype, double* mean, double* m2, size_t channels,
                           size_t pixels) {
  with_element(dtype, [&](auto element) HWY_ATTR {
    moments_of_channels(static_cast<const decltype(element)*>(x), mean, m2, channels, pixels);
  });
}

void channel_affine_range(const void* x, void* out, Dtype dtype, const float* factor, const float* offset,
                          bool with_silu, size_t channels, size_t pixels) {
  with_element(dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    for (size_t p = 0; p < pixels; ++p, from += channels, to += channels) {
      for_each_vector(channels, [=](size_t c, size_t n) HWY_ATTR {
        const Vec y = hn::MulAdd(load(from + c, n), load(factor + c, n), load(offset + c, n));
        store(with_silu ? silu(y) : y, to + c, n);
      });
    }
  });
}

// Returns grad * act'(x * factor + offset) of the vector at channel c.
HWY_INLINE Vec grad_inside(const ChannelNorm& norm, Vec x, Vec grad, size_t c, size_t n) {
  if (!norm.silu) return grad;
  const Vec y = hn::MulAdd(x, load(norm.factor + c, n), load(norm.offset + c, n));
  return hn::Mul(grad, silu_grad(y, sigmoid(y)));
}

template <class T>
void grad_sums(const ChannelNorm& norm, const T* x, const T* grad, float* sums, float* sums_x,
               size_t pixels) {
  const size_t channels = norm.channels;
  for (size_t first = 0; first < pixels; first += kPiecePixels) {
    const size_t begin = first * channels, end = std::min(first + kPiecePixels, pixels) * channels;
    for_each_vector(channels, [&](size_t c, size_t n) HWY_ATTR {
      const Vec mean = load(norm.mean + c, n);
      Vec sum = first > 0 ? load(sums + c, n) : set(0), sum_x = first > 0 ? load(sums_x + c, n) : set(0);
      for (size_t p = begin + c; p < end; p += channels) {
        const Vec value = load(x + p, n), inside = grad_inside(norm, value, load(grad + p, n), c, n);
        sum = hn::Add(sum, inside);
        sum_x = hn::MulAdd(inside, hn::Sub(value, mean), sum_x);
      }
      store(sum, sums + c, n);
      store(sum_x, sums_x + c, n);
    });
  }
}

void channel_grad_sums_range(const ChannelNorm& norm, const void* x, const void* grad, float* sums,
                             float* sums_x, size_t pixels) {
  with_element(norm.dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    grad_sums(norm, static_cast<const T*>(x), static_cast<const T*>(grad), sums, sums_x, pixels);
  });
}

void channel_grad_range(const ChannelNorm& norm, const void* x, const void* grad, const float* slope,
                        const float* shift, void* grad_x, size_t pixels) {
  with_element(norm.dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    const T *from = static_cast<const T*>(x), *of_result = static_cast<const T*>(grad);
    T* to = static_cast<T*>(grad_x);
    for (size_t p = 0; p < pixels; ++p) {
      const size_t pixel = p * norm.channels;
      for_each_vector(norm.channels, [&](size_t c, size_t n) HWY_ATTR {
        const Vec value = load(from + pixel + c, n),
                  inside = grad_inside(norm, value, load(of_result + pixel + c, n), c, n),
                  around = hn::MulAdd(hn::Sub(value, load(norm.mean + c, n)), load(slope + c, n),
                                      load(shift + c, n));
        store(hn::MulAdd(inside, load(norm.factor + c, n), around), to + pixel + c, n);
      });
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {

HWY_EXPORT(normalise_group);
HWY_EXPORT(channel_moments_range);
HWY_EXPORT(channel_affine_range);
HWY_EXPORT(channel_grad_sums_range);
HWY_EXPORT(channel_grad_range);

void group_norm_contiguous(const void* x, void* out, Dtype dtype, const float* weight, const float* bias,
                           float eps, bool silu, size_t channels, size_t pixels) {
  HWY_DYNAMIC_DISPATCH(normalise_group)(x, out, dtype, weight, bias, eps, silu, channels, pixels);
}

void channel_moments(const void* x, Dtype dtype, double* mean, double* m2, size_t channels, size_t pixels) {
  HWY_DYNAMIC_DISPATCH(channel_moments_range)(x, dtype, mean, m2, channels, pixels);
}

void channel_affine(const void* x, void* out, Dtype dtype, const float* factor, const float* offset,
                    bool silu, size_t channels, size_t pixels) {
  HWY_DYNAMIC_DISPATCH(channel_affine_range)(x, out, dtype, factor, offset, silu, channels, pixels);
}

void channel_grad_sums(const ChannelNorm& norm, const void* x, const void* grad, float* sums, float* sums_x,
                       size_t pixels) {
  HWY_DYNAMIC_DISPATCH(channel_grad_sums_range)(norm, x, grad, sums, sums_x, pixels);
}

void channel_grad(const ChannelNorm& norm, const void* x, const void* grad, const float* slope,
                  const float* shift, void* grad_x, size_t pixels) {
  HWY_DYNAMIC_DISPATCH(channel_grad_range)(norm, x, grad, slope, shift, grad_x, pixels);
}

}  // namespace kiln::ops::cpu
#endif
