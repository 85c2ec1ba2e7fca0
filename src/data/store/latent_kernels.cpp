// Compiled with -ffp-contract=off and written without MulAdd, for equal bits on every target (see
// core/philox.cpp).
#include "data/store/latent_kernels.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>

#include "core/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "data/store/latent_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace kiln {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using I32 = hn::RebindToSigned<F32>;
using U16 = hn::Rebind<uint16_t, F32>;
using VF32 = hn::Vec<F32>;

struct LoadF32 {
  using Element = float;
  HWY_INLINE VF32 operator()(const float* p) const { return hn::LoadU(F32(), p); }
  static float one(float x) { return x; }
};
struct LoadBf16 {
  using Element = uint16_t;
  HWY_INLINE VF32 operator()(const uint16_t* p) const {
    return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), p))));
  }
  static float one(uint16_t x) { return bf16_to_float(x); }
};
struct LoadF16 {
  using Element = uint16_t;
  // Does not use Highway's PromoteTo, which without F16C turns infinity and NaN into finite numbers.
  HWY_INLINE VF32 operator()(const uint16_t* p) const {
    const F32 df;
    const U32 d;
    const auto half = hn::PromoteTo(d, hn::LoadU(U16(), p));
    const auto magnitude = hn::And(half, hn::Set(d, 0x7FFFu));
    const auto sign = hn::ShiftLeft<16>(hn::Xor(half, magnitude));
    const auto rebias = hn::Set(d, 112u << 23);
    const auto normal = hn::Add(hn::ShiftLeft<13>(magnitude), rebias);
    const auto subnormal =
        hn::Mul(hn::ConvertTo(df, hn::BitCast(I32(), magnitude)), hn::Set(df, 0x1p-24f));  // exact
    const auto finite =
        hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0x400u)), hn::BitCast(d, subnormal), normal);
    const auto is_finite = hn::Lt(magnitude, hn::Set(d, 0x7C00u));
    const auto result = hn::IfThenElse(is_finite, finite, hn::Add(normal, rebias));
    return hn::BitCast(df, hn::Or(result, sign));
  }
  static float one(uint16_t x) { return fp16_to_float(x); }
};

struct StoreF32 {
  using Element = float;
  HWY_INLINE void operator()(VF32 x, float* p) const { hn::StoreU(x, F32(), p); }
  static float one(float x) { return x; }
};
struct StoreBf16 {
  using Element = uint16_t;
  HWY_INLINE void operator()(VF32 x, uint16_t* p) const {
    const U32 d;
    const auto bits = hn::BitCast(d, x);
    const auto top = hn::ShiftRight<16>(bits);
    const auto odd = hn::And(top, hn::Set(d, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(d, 0x7FFF)), odd));
    const auto is_nan = hn::MaskFromVec(hn::BitCast(d, hn::VecFromMask(F32(), hn::IsNaN(x))));
    const auto result = hn::IfThenElse(is_nan, hn::Or(top, hn::Set(d, 0x40)), rounded);
    // Values fit 16 bits, so the saturating conversion from signed does not saturate.
    hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(I32(), result)), U16(), p);
  }
  static uint16_t one(float x) { return float_to_bf16(x); }
};

template <class Load, class Store>
void convert(const std::byte* HWY_RESTRICT in_bytes, std::byte* HWY_RESTRICT out_bytes, size_t size) {
  const auto* in = reinterpret_cast<const typename Load::Element*>(in_bytes);
  auto* out = reinterpret_cast<typename Store::Element*>(out_bytes);
  const size_t lanes = hn::Lanes(F32());
  size_t i = 0;
  for (; i + lanes <= size; i += lanes) Store()(Load()(in + i), out + i);
  for (; i < size; ++i) out[i] = Store::one(Load::one(in[i]));
}

void f32_to_bf16(const std::byte* in, std::byte* out, size_t size) {
  convert<LoadF32, StoreBf16>(in, out, size);
}
void bf16_to_f32(const std::byte* in, std::byte* out, size_t size) {
  convert<LoadBf16, StoreF32>(in, out, size);
}
void f16_to_f32(const std::byte* in, std::byte* out, size_t size) {
  convert<LoadF16, StoreF32>(in, out, size);
}

// exp(x) for x in [-15, 10]: 2^n * (1 + r q(r)), |r| <= ln(2) / 2; relative error 2e-9 before rounding.
HWY_INLINE VF32 exp_of(VF32 x) {
  const F32 d;
  const I32 di;
  const VF32 magic = hn::Set(d, 12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const VF32 shifted = hn::Add(hn::Mul(x, hn::Set(d, 1.44269504f)), magic);
  const VF32 n = hn::Sub(shifted, magic);
  // ln(2) in two parts, the first short enough for an exact product.
  const VF32 r =
      hn::Sub(hn::Sub(x, hn::Mul(n, hn::Set(d, 0.693359375f))), hn::Mul(n, hn::Set(d, -2.12194440e-4f)));
  VF32 q = hn::Set(d, 0.00139546348f);
  for (const float c : {0.00837511104f, 0.0416661203f, 0.166664168f, 0.5f, 1.0f})
    q = hn::Add(hn::Mul(q, r), hn::Set(d, c));
  const VF32 mantissa = hn::Add(hn::Mul(q, r), hn::Set(d, 1.0f));
  const auto exponent = hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, magic));
  return hn::BitCast(d, hn::Add(hn::BitCast(di, mantissa), hn::ShiftLeft<23>(exponent)));
}

HWY_INLINE VF32 posterior(VF32 mean, VF32 logvar, VF32 epsilon, VF32 shift, VF32 scale) {
  const F32 d;
  const VF32 clamped = hn::Max(hn::Min(logvar, hn::Set(d, 20.0f)), hn::Set(d, -30.0f));
  const VF32 sigma = exp_of(hn::Mul(clamped, hn::Set(d, 0.5f)));
  return hn::Mul(hn::Sub(hn::Add(mean, hn::Mul(sigma, epsilon)), shift), scale);
}

void posterior_loop(float* HWY_RESTRICT x, const float* HWY_RESTRICT logvar,
                    const float* HWY_RESTRICT epsilon, size_t size, float shift_factor,
                    float scaling_factor) {
  const F32 d;
  const VF32 shift = hn::Set(d, shift_factor), scale = hn::Set(d, scaling_factor);
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= size; i += lanes)
    hn::StoreU(
        posterior(hn::LoadU(d, x + i), hn::LoadU(d, logvar + i), hn::LoadU(d, epsilon + i), shift, scale), d,
        x + i);
  if (i == size) return;
  HWY_ALIGN float rest[3][hn::MaxLanes(F32())] = {};
  const size_t bytes = (size - i) * sizeof(float);
  std::memcpy(rest[0], x + i, bytes);
  std::memcpy(rest[1], logvar + i, bytes);
  std::memcpy(rest[2], epsilon + i, bytes);
  hn::Store(posterior(hn::Load(d, rest[0]), hn::Load(d, rest[1]), hn::Load(d, rest[2]), shift, scale), d,
            rest[0]);
  std::memcpy(x + i, rest[0], bytes);
}

void scale_loop(float* HWY_RESTRICT x, size_t size, float shift_factor, float scaling_factor) {
  const F32 d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= size; i += lanes) {
    const VF32 shifted = hn::Sub(hn::LoadU(d, x + i), hn::Set(d, shift_factor));
    hn::StoreU(hn::Mul(shifted, hn::Set(d, scaling_factor)), d, x + i);
  }
  for (; i < size; ++i) x[i] = (x[i] - shift_factor) * scaling_factor;
}

bool all_finite(const float* HWY_RESTRICT x, size_t size) {
  const U32 d;
  const auto exponent = hn::Set(d, 0x7F800000u);
  auto bad = hn::Zero(d);
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= size; i += lanes) {
    const auto bits = hn::And(hn::BitCast(d, hn::LoadU(F32(), x + i)), exponent);
    bad = hn::Or(bad, hn::VecFromMask(d, hn::Eq(bits, exponent)));
  }
  bool finite = hn::AllFalse(d, hn::Ne(bad, hn::Zero(d)));
  for (; i < size; ++i) finite &= std::isfinite(x[i]);
  return finite;
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln {

HWY_EXPORT(f32_to_bf16);
HWY_EXPORT(bf16_to_f32);
HWY_EXPORT(f16_to_f32);
HWY_EXPORT(posterior_loop);
HWY_EXPORT(scale_loop);
HWY_EXPORT(all_finite);

void latents_to_f32(Dtype dtype, const std::byte* in, std::span<float> out) {
  auto* bytes = reinterpret_cast<std::byte*>(out.data());
  switch (dtype) {
    case Dtype::kF32:
      std::copy_n(in, out.size_bytes(), bytes);
      return;
    case Dtype::kBF16:
      return HWY_DYNAMIC_DISPATCH(bf16_to_f32)(in, bytes, out.size());
    case Dtype::kF16:
      return HWY_DYNAMIC_DISPATCH(f16_to_f32)(in, bytes, out.size());
    default:
      throw std::logic_error("latents are F32, BF16 or F16");
  }
}

void latents_from_f32(std::span<const float> in, Dtype dtype, std::byte* out) {
  switch (dtype) {
    case Dtype::kF32:
      std::ranges::copy(std::as_bytes(in), out);
      return;
    case Dtype::kBF16:
      return HWY_DYNAMIC_DISPATCH(f32_to_bf16)(reinterpret_cast<const std::byte*>(in.data()), out, in.size());
    case Dtype::kF16:
      for (size_t i = 0; i < in.size(); ++i) {
        const uint16_t bits = float_to_fp16(in[i]);
        std::memcpy(out + 2 * i, &bits, 2);
      }
      return;
    default:
      throw std::logic_error("latents are F32, BF16 or F16");
  }
}

void draw_posterior(std::span<float> mean_to_x, std::span<const float> logvar, std::span<const float> epsilon,
                    float shift_factor, float scaling_factor) {
  assert(logvar.size() == mean_to_x.size() && epsilon.size() == mean_to_x.size());
  HWY_DYNAMIC_DISPATCH(posterior_loop)
  (mean_to_x.data(), logvar.data(), epsilon.data(), mean_to_x.size(), shift_factor, scaling_factor);
}

void scale_latents(std::span<float> x, float shift_factor, float scaling_factor) {
  HWY_DYNAMIC_DISPATCH(scale_loop)(x.data(), x.size(), shift_factor, scaling_factor);
}

void mirror_rows(std::span<float> x, int64_t width) {
  for (auto row = x.begin(); row != x.end(); row += width) std::reverse(row, row + width);
}

int64_t find_nonfinite(std::span<const float> x) {
  if (HWY_DYNAMIC_DISPATCH(all_finite)(x.data(), x.size())) return -1;
  return std::find_if(x.begin(), x.end(), [](float v) { return !std::isfinite(v); }) - x.begin();
}

}  // namespace kiln
#endif  // HWY_ONCE
