// Loads and stores f32, bf16 or fp16 memory as vectors of f32, whole or partial, for the instruction set
// being compiled (Highway includes this once for each).
#if defined(KILN_OPS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KILN_OPS_CPU_SIMD_INL_H_
#undef KILN_OPS_CPU_SIMD_INL_H_
#else
#define KILN_OPS_CPU_SIMD_INL_H_
#endif
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "core/cpu_level.h"
#include "core/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<uint16_t, F32>;
using F16 = hn::Rebind<hwy::float16_t, F32>;
using Vec = hn::Vec<F32>;
using Bf16 = hwy::bfloat16_t;
using Fp16 = hwy::float16_t;

inline constexpr size_t kLanes = hn::MaxLanes(F32());

HWY_INLINE Vec set(float value) { return hn::Set(F32(), value); }

HWY_INLINE Vec load(const float* p) { return hn::LoadU(F32(), p); }
HWY_INLINE Vec load(const Bf16* p) {
  const auto bits = hn::LoadU(U16(), reinterpret_cast<const uint16_t*>(p));
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), bits)));
}
#if HWY_TARGET == HWY_SCALAR  // there Highway's own conversion lacks infinity and rounding to even
HWY_INLINE Vec load(const Fp16* p) { return set(fp16_to_float(p->bits)); }
#else
HWY_INLINE Vec load(const Fp16* p) { return hn::PromoteTo(F32(), hn::LoadU(F16(), p)); }
#endif

// Rounds to nearest even; NaN stays NaN.
HWY_INLINE hn::Vec<U16> to_bf16_bits(Vec v) {
  const U32 d;
  const auto bits = hn::BitCast(d, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(d, 0x7fff)));
  const auto quiet = hn::Or(bits, hn::Set(d, 0x00400000));
  const auto result = hn::IfThenElse(hn::RebindMask(d, hn::IsNaN(v)), quiet, rounded);
  return hn::TruncateTo(U16(), hn::ShiftRight<16>(result));
}

HWY_INLINE void store(Vec v, float* p) { hn::StoreU(v, F32(), p); }
// Rounds as to_bf16_bits does, by one instruction where the processor has it, which takes denormals for zero.
// Highway's AVX-512 does not include it.
HWY_INLINE void store(Vec v, Bf16* p) {
#if HWY_TARGET == HWY_AVX3
  if (HWY_LIKELY(rounds_bf16_at_once)) {
    hn::Vec<U16> rounded;
    asm("vcvtneps2bf16 %1, %0" : "=v"(rounded.raw) : "v"(v.raw));
    return hn::StoreU(rounded, U16(), reinterpret_cast<uint16_t*>(p));
  }
#endif
  hn::StoreU(to_bf16_bits(v), U16(), reinterpret_cast<uint16_t*>(p));
}
#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void store(Vec v, Fp16* p) { p->bits = float_to_fp16(hn::GetLane(v)); }
#else
HWY_INLINE void store(Vec v, Fp16* p) { hn::StoreU(hn::DemoteTo(F16(), v), F16(), p); }
#endif

// Loads or stores the first `count` <= kLanes elements. Lanes beyond them load as zero, and memory beyond
// them is not touched.
template <class T>
HWY_INLINE Vec load(const T* p, size_t count) {
  if (kLanes == 1 || HWY_LIKELY(count == kLanes)) {
    return load(p);
  }
  HWY_ALIGN T padded[kLanes] = {};
  std::memcpy(padded, p, std::min(count, kLanes) * sizeof(T));
  return load(padded);
}
template <class T>
HWY_INLINE void store(Vec v, T* p, size_t count) {
  if (kLanes == 1 || HWY_LIKELY(count == kLanes)) {
    store(v, p);
    return;
  }
  HWY_ALIGN T padded[kLanes];
  store(v, padded);
  std::memcpy(p, padded, std::min(count, kLanes) * sizeof(T));
}

// Calls body(i, count) for consecutive vectors of [0, n). count is kLanes except in a last, partial vector.
template <class Body>
HWY_INLINE void for_each_vector(size_t n, const Body& body) {
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    body(i, kLanes);
  }
  if (i < n) {
    body(i, n - i);
  }
}

HWY_INLINE float sum_lanes(Vec v) { return hn::GetLane(hn::SumOfLanes(F32(), v)); }

// Calls body(element) with a value of the element type that `dtype` names.
template <class Body>
HWY_INLINE void with_element(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::kBF16:
      return body(Bf16());
    case Dtype::kF16:
      return body(Fp16());
    default:
      return body(float());
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#endif
