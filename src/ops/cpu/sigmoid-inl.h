// exp2 and the logistic function on vectors of f32, for the instruction set being compiled.
#if defined(KILN_OPS_CPU_SIGMOID_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KILN_OPS_CPU_SIGMOID_INL_H_
#undef KILN_OPS_CPU_SIGMOID_INL_H_
#else
#define KILN_OPS_CPU_SIGMOID_INL_H_
#endif
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

// Returns 2^z for z in [-126, 127]; below, z is clamped. Relative error below 1.5e-7.
HWY_INLINE Vec exp2_below_127(Vec z) {
  z = hn::Max(set(-126.0f), z);
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the significand.
  const Vec shifted = hn::Add(z, set(12582912.0f));
  const Vec fraction = hn::Sub(z, hn::Sub(shifted, set(12582912.0f)));  // [-0.5, 0.5]
  Vec p = set(1.535336188319500e-4f);                                   // minimax polynomial of 2^f, degree 6
  p = hn::MulAdd(p, fraction, set(1.339887440266574e-3f));
  p = hn::MulAdd(p, fraction, set(9.618437357674640e-3f));
  p = hn::MulAdd(p, fraction, set(5.550332471162809e-2f));
  p = hn::MulAdd(p, fraction, set(2.402264791363012e-1f));
  p = hn::MulAdd(p, fraction, set(6.931472028550421e-1f));
  p = hn::MulAdd(p, fraction, set(1.0f));
  const U32 bits;
  return hn::BitCast(F32(), hn::Add(hn::BitCast(bits, p), hn::ShiftLeft<23>(hn::BitCast(bits, shifted))));
}

// The same for z in [-126, 128] (2^128 is inf). Above, z is clamped too.
HWY_INLINE Vec exp2(Vec z) { return exp2_below_127(hn::Min(set(128.0f), z)); }

inline constexpr float kLog2E = 1.44269504088896341f;

// Returns x * sigmoid(x). -inf gives NaN, as x * 0 would.
HWY_INLINE Vec silu(Vec x) { return hn::Div(x, hn::Add(set(1.0f), exp2(hn::Mul(x, set(-kLog2E))))); }

HWY_INLINE Vec sigmoid(Vec x) {
  return hn::Div(set(1.0f), hn::Add(set(1.0f), exp2(hn::Mul(x, set(-kLog2E)))));
}
// silu'(x) = s (1 + x (1 - s)), s = sigmoid(x)
HWY_INLINE Vec silu_grad(Vec x, Vec s) { return hn::Mul(s, hn::MulAdd(x, hn::Sub(set(1.0f), s), set(1.0f))); }

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#endif
