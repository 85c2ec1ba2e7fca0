// Philox4x32-10 and Box-Muller normals, one translation unit per SIMD target (Highway's dynamic dispatch).
// Products and sums are rounded one by one: no fused multiply-add (MulAdd would be one on some targets only,
// and this file is compiled with -ffp-contract=off), so every target yields the same bits.
#include "core/philox.h"

#include <algorithm>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/philox.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace kiln {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A group is 16 Philox blocks = 64 normals. Word w of block b gives element 16 w + b, so that whole vectors
// are stored whatever their width.
constexpr size_t kBlocksPerGroup = 16;
constexpr size_t kGroup = 4 * kBlocksPerGroup;

using U32 = hn::CappedTag<uint32_t, kBlocksPerGroup>;
using I32 = hn::RebindToSigned<U32>;
using F32 = hn::RebindToFloat<U32>;
using VU32 = hn::Vec<U32>;
using VF32 = hn::Vec<F32>;

struct Words {
  VU32 w0, w1, w2, w3;
};

#if HWY_TARGET == HWY_SCALAR
// One block: the scalar target has no 64-bit view of a 32-bit lane.
HWY_INLINE Words philox_words(uint64_t seed, uint32_t draw, uint64_t index, uint32_t block) {
  const U32 d;
  const auto w =
      philox4x32_10({block, draw, static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32)},
                    {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return {hn::Set(d, w[0]), hn::Set(d, w[1]), hn::Set(d, w[2]), hn::Set(d, w[3])};
}
#else
using U64 = hn::Repartition<uint64_t, U32>;
using VU64 = hn::Vec<U64>;

// Philox state of N / 2 blocks: each counter word in the low half of a 64-bit lane (the high halves hold
// junk, which neither the even-lane product nor the final merge reads).
struct Counters {
  VU64 c0, c1, c2, c3;
};

HWY_INLINE Counters round(Counters c, VU64 k0, VU64 k1) {
  const U32 d32;
  const VU64 p0 = hn::MulEven(hn::BitCast(d32, c.c0), hn::Set(d32, 0xD2511F53u));
  const VU64 p1 = hn::MulEven(hn::BitCast(d32, c.c2), hn::Set(d32, 0xCD9E8D57u));
  return {hn::Xor(hn::Xor(hn::ShiftRight<32>(p1), c.c1), k0), p1,
          hn::Xor(hn::Xor(hn::ShiftRight<32>(p0), c.c3), k1), p0};
}

// Joins the low halves of `even` and `odd` into one vector of 32-bit words in block order.
HWY_INLINE VU32 merge(VU64 even, VU64 odd) {
  const U64 d64;
  return hn::BitCast(U32(), hn::Or(hn::And(even, hn::Set(d64, 0xFFFFFFFFu)), hn::ShiftLeft<32>(odd)));
}

// The words of Lanes(U32) blocks from `block` on.
HWY_INLINE Words philox_words(uint64_t seed, uint32_t draw, uint64_t index, uint32_t block) {
  const U64 d64;
  Counters even, odd;
  even.c0 = hn::BitCast(d64, hn::Iota(U32(), block));
  odd.c0 = hn::ShiftRight<32>(even.c0);
  even.c1 = odd.c1 = hn::Set(d64, draw);
  even.c2 = odd.c2 = hn::Set(d64, index & 0xFFFFFFFFu);
  even.c3 = odd.c3 = hn::Set(d64, index >> 32);
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int r = 0; r < 10; ++r) {
    const VU64 k0 = hn::Set(d64, key0), k1 = hn::Set(d64, key1);
    even = round(even, k0, k1);
    odd = round(odd, k0, k1);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {merge(even.c0, odd.c0), merge(even.c1, odd.c1), merge(even.c2, odd.c2), merge(even.c3, odd.c3)};
}
#endif

// ln(u) for u in [2^-32, 1]; polynomial of ln(1 + f) on [sqrt(1/2) - 1, sqrt(2) - 1], relative error 3e-8
// before rounding.
HWY_INLINE VF32 log_of(VF32 u) {
  const F32 df;
  const I32 di;
  const auto bits = hn::BitCast(di, u);
  const auto exponent = hn::ShiftRight<23>(hn::Sub(bits, hn::Set(di, 0x3F3504F3)));
  const VF32 f = hn::Sub(hn::BitCast(df, hn::Sub(bits, hn::ShiftLeft<23>(exponent))), hn::Set(df, 1.0f));
  VF32 p = hn::Set(df, 0.0870043039f);
  for (const float c :
       {-0.142674863f, 0.149147689f, -0.16577585f, 0.199630633f, -0.250013381f, 0.333339095f}) {
    p = hn::Add(hn::Mul(p, f), hn::Set(df, c));
  }
  const VF32 f2 = hn::Mul(f, f);
  const VF32 tail = hn::Sub(hn::Mul(hn::Mul(f2, f), p), hn::Mul(f2, hn::Set(df, 0.5f)));
  return hn::Add(hn::Add(tail, f), hn::Mul(hn::ConvertTo(df, exponent), hn::Set(df, 0.693147181f)));
}

// cos and sin of 2 pi b / 2^32. The two top bits (rounded) choose the quadrant, the rest is t in [-1, 1) of
// pi/4.
HWY_INLINE void cos_sin(VU32 b, VF32& cosine, VF32& sine) {
  const F32 df;
  const I32 di;
  const U32 du;
  const VU32 quadrant = hn::ShiftRight<30>(hn::Add(b, hn::Set(du, 0x20000000u)));
  const VF32 t = hn::Mul(hn::ConvertTo(df, hn::BitCast(di, hn::ShiftLeft<2>(b))), hn::Set(df, 0x1p-31f));
  const VF32 t2 = hn::Mul(t, t);
  VF32 s = hn::Set(df, -3.5950452e-05f);
  for (const float c : {0.00249000103f, -0.0807454363f, 0.785398185f})
    s = hn::Add(hn::Mul(s, t2), hn::Set(df, c));
  s = hn::Mul(s, t);
  VF32 c = hn::Set(df, 3.53133464e-06f);
  for (const float k : {-0.000325942005f, 0.015854327f, -0.308425128f, 1.0f}) {
    c = hn::Add(hn::Mul(c, t2), hn::Set(df, k));
  }
  const auto swap =
      hn::MaskFromVec(hn::BitCast(df, hn::Sub(hn::Zero(du), hn::And(quadrant, hn::Set(du, 1)))));
  // cos is negative in quadrants 1 and 2, sin in 2 and 3.
  const VU32 cos_sign = hn::ShiftLeft<30>(hn::And(hn::Add(quadrant, hn::Set(du, 1)), hn::Set(du, 2)));
  const VU32 sin_sign = hn::ShiftLeft<30>(hn::And(quadrant, hn::Set(du, 2)));
  cosine = hn::Xor(hn::IfThenElse(swap, s, c), hn::BitCast(df, cos_sign));
  sine = hn::Xor(hn::IfThenElse(swap, c, s), hn::BitCast(df, sin_sign));
}

// Box-Muller: two independent normals from two random words.
HWY_INLINE void box_muller(VU32 a, VU32 b, float* HWY_RESTRICT out0, float* HWY_RESTRICT out1) {
  const F32 df;
  const VF32 whole = hn::ConvertTo(df, hn::BitCast(I32(), hn::ShiftRight<1>(a)));
  const VF32 u = hn::Mul(hn::Add(whole, hn::Set(df, 0.5f)), hn::Set(df, 0x1p-31f));  // (0, 1]
  const VF32 radius = hn::Sqrt(hn::Mul(log_of(u), hn::Set(df, -2.0f)));
  VF32 cosine, sine;
  cos_sin(b, cosine, sine);
  hn::StoreU(hn::Mul(radius, cosine), df, out0);
  hn::StoreU(hn::Mul(radius, sine), df, out1);
}

// The 64 normals of group `group`.
HWY_INLINE void normal_group(uint64_t seed, uint32_t draw, uint64_t index, uint32_t group,
                             float* HWY_RESTRICT out) {
  const size_t lanes = hn::Lanes(U32());
  for (size_t b = 0; b < kBlocksPerGroup; b += lanes) {
    const Words w = philox_words(seed, draw, index,
                                 group * static_cast<uint32_t>(kBlocksPerGroup) + static_cast<uint32_t>(b));
    float* p = out + b;
    box_muller(w.w0, w.w1, p, p + kBlocksPerGroup);
    box_muller(w.w2, w.w3, p + 2 * kBlocksPerGroup, p + 3 * kBlocksPerGroup);
  }
}

void normals(uint64_t seed, uint32_t draw, uint64_t index, float* HWY_RESTRICT out, size_t size) {
  uint32_t group = 0;
  for (; size >= kGroup; size -= kGroup, out += kGroup) normal_group(seed, draw, index, group++, out);
  if (size > 0) {
    float rest[kGroup];
    normal_group(seed, draw, index, group, rest);
    std::memcpy(out, rest, size * sizeof(float));
  }
}

void words(uint64_t seed, uint32_t draw, uint64_t index, uint32_t group, uint32_t* HWY_RESTRICT out,
           size_t size) {
  const U32 d;
  const size_t lanes = hn::Lanes(d);
  uint32_t made[kGroup];
  for (size_t done = 0; done < size; done += kGroup, ++group) {
    for (size_t b = 0; b < kBlocksPerGroup; b += lanes) {
      const Words w = philox_words(seed, draw, index,
                                   group * static_cast<uint32_t>(kBlocksPerGroup) + static_cast<uint32_t>(b));
      hn::StoreU(w.w0, d, made + b);
      hn::StoreU(w.w1, d, made + kBlocksPerGroup + b);
      hn::StoreU(w.w2, d, made + 2 * kBlocksPerGroup + b);
      hn::StoreU(w.w3, d, made + 3 * kBlocksPerGroup + b);
    }
    std::memcpy(out + done, made, std::min(kGroup, size - done) * sizeof(uint32_t));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln {

HWY_EXPORT(normals);
HWY_EXPORT(words);

std::array<uint32_t, 4> philox4x32_10(std::array<uint32_t, 4> c, std::array<uint32_t, 2> key) {
  for (int r = 0; r < 10; ++r) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(p0)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return c;
}

double philox_uniform(uint64_t seed, Draw draw, uint64_t index, uint32_t element) {
  // The top bit keeps uniforms apart from the normals of the same purpose.
  constexpr uint32_t kUniform = 0x80000000u;
  const auto words = philox4x32_10({element, static_cast<uint32_t>(draw) | kUniform,
                                    static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32)},
                                   {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t bits = (uint64_t{words[0]} << 32 | words[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

void philox_normal(uint64_t seed, Draw draw, uint64_t index, std::span<float> out) {
  HWY_DYNAMIC_DISPATCH(normals)(seed, static_cast<uint32_t>(draw), index, out.data(), out.size());
}

void philox_words(uint64_t seed, Draw draw, uint64_t index, uint32_t first_group, std::span<uint32_t> out) {
  HWY_DYNAMIC_DISPATCH(words)(seed, static_cast<uint32_t>(draw), index, first_group, out.data(), out.size());
}

}  // namespace kiln
#endif  // HWY_ONCE
