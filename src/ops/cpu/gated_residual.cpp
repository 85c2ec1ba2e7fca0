// x + gate * y, and the sums over rows that it shares with adaLN's backward.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/gated_residual.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

void widen_gate(const GatedResidualArgs& args, size_t row, float* to) {
  with_element(args.gate_dtype, [&](auto element) HWY_ATTR {
    const auto* gate =
        static_cast<const decltype(element)*>(args.gate) + row / args.rows_per_batch * args.gate_stride;
    for_each_vector(args.width,
                    [=](size_t j, size_t count) HWY_ATTR { store(load(gate + j, count), to + j, count); });
  });
}

template <class TX, class TY>
void forward_rows(const GatedResidualArgs& args, const TX* xs, TX* outs, size_t row_begin, size_t row_end) {
  const size_t width = args.width;
  std::vector<float> gates(width);
  float* gate = gates.data();
  for (size_t row = row_begin; row < row_end; ++row) {
    if (row == row_begin || row % args.rows_per_batch == 0) {
      widen_gate(args, row, gate);
    }
    const TX* x = xs + row * width;
    const TY* y = static_cast<const TY*>(args.y) + row * width;
    TX* out = outs + row * width;
    for_each_vector(width, [=](size_t j, size_t count) HWY_ATTR {
      store(hn::MulAdd(load(gate + j, count), load(y + j, count), load(x + j, count)), out + j, count);
    });
  }
}

template <class TGrad, class TY>
void backward_rows(const GatedResidualArgs& args, const TGrad* grads, TY* dys, float* dgate, size_t row_begin,
                   size_t row_end) {
  const size_t width = args.width;
  std::vector<float> gates(width);
  float* gate = gates.data();
  widen_gate(args, row_begin, gate);
  std::fill_n(dgate, width, 0.0f);
  for (size_t row = row_begin; row < row_end; ++row) {
    const TGrad* grad = grads + row * width;
    const TY* y = static_cast<const TY*>(args.y) + row * width;
    TY* dy = dys + row * width;
    for_each_vector(width, [=](size_t j, size_t count) HWY_ATTR {
      const Vec g = load(grad + j, count);
      store(hn::Mul(g, load(gate + j, count)), dy + j, count);
      store(hn::MulAdd(g, load(y + j, count), load(dgate + j, count)), dgate + j, count);
    });
  }
}

void gated_residual_forward(const GatedResidualArgs& args, const void* x, void* out, Dtype x_dtype,
                            size_t row_begin, size_t row_end) {
  with_element(x_dtype, [&](auto residual) HWY_ATTR {
    using TX = decltype(residual);
    with_element(args.y_dtype, [&](auto branch) HWY_ATTR {
      forward_rows<TX, decltype(branch)>(args, static_cast<const TX*>(x), static_cast<TX*>(out), row_begin,
                                         row_end);
    });
  });
}

void gated_residual_backward(const GatedResidualArgs& args, const void* grad, Dtype grad_dtype, void* dy,
                             float* dgate, size_t row_begin, size_t row_end) {
  with_element(grad_dtype, [&](auto residual) HWY_ATTR {
    with_element(args.y_dtype, [&](auto branch) HWY_ATTR {
      backward_rows(args, static_cast<const decltype(residual)*>(grad), static_cast<decltype(branch)*>(dy),
                    dgate, row_begin, row_end);
    });
  });
}

void sum_rows(const float* partials, size_t count, size_t stride, void* out, Dtype out_dtype, size_t width) {
  with_element(out_dtype, [&](auto element) HWY_ATTR {
    auto* to = static_cast<decltype(element)*>(out);
    for_each_vector(width, [=](size_t j, size_t lanes) HWY_ATTR {
      Vec sum = load(partials + j, lanes);
      for (size_t c = 1; c < count; ++c) {
        sum = hn::Add(sum, load(partials + c * stride + j, lanes));
      }
      store(sum, to + j, lanes);
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {

HWY_EXPORT(gated_residual_forward);
HWY_EXPORT(gated_residual_backward);
HWY_EXPORT(sum_rows);

void gated_residual(const GatedResidualArgs& args, const void* x, void* out, Dtype x_dtype, size_t row_begin,
                    size_t row_end) {
  HWY_DYNAMIC_DISPATCH(gated_residual_forward)(args, x, out, x_dtype, row_begin, row_end);
}

void gated_residual_grad(const GatedResidualArgs& args, const void* grad, Dtype grad_dtype, void* dy,
                         float* dgate, size_t row_begin, size_t row_end) {
  HWY_DYNAMIC_DISPATCH(gated_residual_backward)(args, grad, grad_dtype, dy, dgate, row_begin, row_end);
}

void sum_partials(const float* partials, size_t count, size_t stride, void* out, Dtype out_dtype,
                  size_t width) {
  HWY_DYNAMIC_DISPATCH(sum_rows)(partials, count, stride, out, out_dtype, width);
}

}  // namespace kiln::ops::cpu
#endif
