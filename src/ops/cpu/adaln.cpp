// adaLN: LayerNorm without affine, then * (1 + scale) + shift. A row is read three times, but from memory
// only once.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/adaln.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

// to[j] = from[j] + addend, widened to f32.
void widen(const void* from, Dtype dtype, size_t offset, float addend, float* to, size_t n) {
  with_element(dtype, [&](auto element) HWY_ATTR {
    const auto* p = static_cast<const decltype(element)*>(from) + offset;
    for_each_vector(n, [=](size_t j, size_t count)
                           HWY_ATTR { store(hn::Add(load(p + j, count), set(addend)), to + j, count); });
  });
}

template <class T>
HWY_INLINE void row_moments(const T* x, size_t width, float eps, float* mean, float* rstd) {
  Vec sum = set(0);
  for_each_vector(width, [&](size_t j, size_t count) HWY_ATTR { sum = hn::Add(sum, load(x + j, count)); });
  const float centre = sum_lanes(sum) / width;
  Vec squares = set(0);
  const Vec c = set(centre);
  const size_t whole = width / kLanes * kLanes;
  for (size_t j = 0; j < whole; j += kLanes) {
    const Vec d = hn::Sub(load(x + j), c);
    squares = hn::MulAdd(d, d, squares);
  }
  float variance = sum_lanes(squares);
  if (whole < width) {  // the padding of a partial vector is 0, not the mean
    HWY_ALIGN float tail[kLanes];
    store(hn::Sub(load(x + whole, width - whole), c), tail);
    for (size_t j = 0; j < width - whole; ++j) {
      variance += tail[j] * tail[j];
    }
  }
  *mean = centre;
  *rstd = 1 / std::sqrt(variance / width + eps);
}

template <class TIn, class TOut>
void forward_rows(const AdalnArgs& args, TOut* out, size_t row_begin, size_t row_end) {
  const size_t width = args.width;
  std::vector<float> modulation(2 * width);  // shift, then 1 + scale, of the current batch
  float* shift = modulation.data();
  float* factor = shift + width;
  for (size_t row = row_begin; row < row_end; ++row) {
    if (row == row_begin || row % args.rows_per_batch == 0) {
      const size_t batch = row / args.rows_per_batch;
      widen(args.shift, args.modulation_dtype, batch * args.shift_stride, 0, shift, width);
      widen(args.scale, args.modulation_dtype, batch * args.scale_stride, 1, factor, width);
    }
    const TIn* x = static_cast<const TIn*>(args.x) + row * width;
    row_moments(x, width, args.eps, args.mean + row, args.rstd + row);
    const Vec mean = set(args.mean[row]), rstd = set(args.rstd[row]);
    TOut* to = out + row * width;
    for_each_vector(width, [=](size_t j, size_t count) HWY_ATTR {
      const Vec normalised = hn::Mul(hn::Sub(load(x + j, count), mean), rstd);
      store(hn::MulAdd(normalised, load(factor + j, count), load(shift + j, count)), to + j, count);
    });
  }
}

// With xhat = (x - mean) rstd and h = grad (1 + scale):  dx = rstd (h - mean(h) - xhat mean(h xhat)), plus
// `around`.
template <class TIn, class TGrad>
void backward_rows(const AdalnArgs& args, const TGrad* grads, const TIn* around, TIn* dx, float* dshift,
                   float* dscale, size_t row_begin, size_t row_end) {
  const size_t width = args.width;
  std::vector<float> factors(width);
  float* factor = factors.data();
  widen(args.scale, args.modulation_dtype, row_begin / args.rows_per_batch * args.scale_stride, 1, factor,
        width);
  std::fill_n(dshift, width, 0.0f);
  std::fill_n(dscale, width, 0.0f);
  for (size_t row = row_begin; row < row_end; ++row) {
    const TIn* x = static_cast<const TIn*>(args.x) + row * width;
    const TGrad* grad = grads + row * width;
    const TIn* rest = around == nullptr ? nullptr : around + row * width;
    TIn* to = dx + row * width;
    const Vec mean = set(args.mean[row]), rstd = set(args.rstd[row]);
    Vec sum = set(0), sum_xhat = set(0);
    for_each_vector(width, [&](size_t j, size_t count) HWY_ATTR {
      const Vec g = load(grad + j, count);
      const Vec xhat = hn::Mul(hn::Sub(load(x + j, count), mean), rstd);
      store(hn::Add(load(dshift + j, count), g), dshift + j, count);
      store(hn::MulAdd(g, xhat, load(dscale + j, count)), dscale + j, count);
      const Vec h = hn::Mul(g, load(factor + j, count));
      sum = hn::Add(sum, h);
      sum_xhat = hn::MulAdd(h, xhat, sum_xhat);
    });
    const Vec mean_h = set(sum_lanes(sum) / width), mean_h_xhat = set(sum_lanes(sum_xhat) / width);
    for_each_vector(width, [=](size_t j, size_t count) HWY_ATTR {
      const Vec h = hn::Mul(load(grad + j, count), load(factor + j, count));
      const Vec xhat = hn::Mul(hn::Sub(load(x + j, count), mean), rstd);
      const Vec through = hn::Mul(rstd, hn::NegMulAdd(xhat, mean_h_xhat, hn::Sub(h, mean_h)));
      store(rest == nullptr ? through : hn::Add(load(rest + j, count), through), to + j, count);
    });
  }
}

void adaln_forward(const AdalnArgs& args, void* out, Dtype out_dtype, size_t row_begin, size_t row_end) {
  with_element(args.x_dtype, [&](auto in) HWY_ATTR {
    with_element(out_dtype, [&](auto to) HWY_ATTR {
      forward_rows<decltype(in)>(args, static_cast<decltype(to)*>(out), row_begin, row_end);
    });
  });
}

void adaln_backward(const AdalnArgs& args, const void* grad, Dtype grad_dtype, const void* around, void* dx,
                    float* dshift, float* dscale, size_t row_begin, size_t row_end) {
  with_element(args.x_dtype, [&](auto in) HWY_ATTR {
    with_element(grad_dtype, [&](auto g) HWY_ATTR {
      using TIn = decltype(in);
      backward_rows(args, static_cast<const decltype(g)*>(grad), static_cast<const TIn*>(around),
                    static_cast<TIn*>(dx), dshift, dscale, row_begin, row_end);
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {

HWY_EXPORT(adaln_forward);
HWY_EXPORT(adaln_backward);

void adaln(const AdalnArgs& args, void* out, Dtype out_dtype, size_t row_begin, size_t row_end) {
  HWY_DYNAMIC_DISPATCH(adaln_forward)(args, out, out_dtype, row_begin, row_end);
}

void adaln_grad(const AdalnArgs& args, const void* grad, Dtype grad_dtype, const void* around, void* dx,
                float* dshift, float* dscale, size_t row_begin, size_t row_end) {
  HWY_DYNAMIC_DISPATCH(adaln_backward)
  (args, grad, grad_dtype, around, dx, dshift, dscale, row_begin, row_end);
}

}  // namespace kiln::ops::cpu
#endif
