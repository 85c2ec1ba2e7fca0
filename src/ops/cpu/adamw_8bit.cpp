// AdamW with moments of 8 bits, block by block. Moments become f32, move, and move the weights; once the
// largest of a block is known they become 8 bits again. No block is divided, so any split of the memory gives
// the same bits.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/adamw_8bit.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "ops/cpu/adamw_8bit.h"
#include "ops/cpu/simd-inl.h"
#include "ops/cpu/streams-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

using I32 = hn::RebindToSigned<F32>;
using U8 = hn::Rebind<uint8_t, F32>;

// Loads kLanes places as indices. `p` must have that many, even if fewer are wanted.
HWY_INLINE hn::Vec<I32> load_places(const uint8_t* p) { return hn::PromoteTo(I32(), hn::LoadU(U8(), p)); }

HWY_INLINE Vec read(const PlaceTable& table, hn::Vec<I32> places, Vec scale) {
  return hn::Mul(hn::GatherIndex(F32(), table.values, places), scale);
}

// Returns the places nearest to `values` of [-1, 1].
template <bool kSigned>
HWY_INLINE hn::Vec<hn::Rebind<uint8_t, F32>> places_of(const PlaceTable& table, Vec values) {
  constexpr int kBits = part_bits(kSigned);
  const I32 d;
  const auto last_bits = hn::Set(d, (1 << kBits) - 1);
  const auto bits = hn::BitCast(d, hn::Abs(values));
  auto part = hn::Sub(hn::ShiftRight<kBits>(bits), hn::Set(d, static_cast<int32_t>(first_part(kSigned))));
  part = hn::Min(hn::Max(part, hn::Zero(d)), hn::Set(d, static_cast<int32_t>(num_parts(kSigned)) - 1));
  auto rest = hn::And(bits, last_bits);
  if constexpr (kSigned) {  // among negative values, a smaller magnitude is a larger value
    const auto negative = hn::BroadcastSignBit(hn::BitCast(d, values));
    part = hn::Add(part, hn::And(negative, hn::Set(d, static_cast<int32_t>(num_parts(kSigned)))));
    rest = hn::Xor(rest, hn::And(negative, last_bits));
  }
  const auto entry = hn::GatherIndex(d, reinterpret_cast<const int32_t*>(table.entries), part);
  const auto above = hn::VecFromMask(d, hn::Gt(rest, hn::And(entry, last_bits)));  // -1 where it is
  return hn::DemoteTo(U8(), hn::Sub(hn::ShiftRight<kBits>(entry), above));
}

// The moments of a block as f32, and the places of a narrower block.
struct Block {
  HWY_ALIGN float mean[kBlock8bit];
  HWY_ALIGN float square[kBlock8bit];
  HWY_ALIGN uint8_t mean_places[kBlock8bit];
  HWY_ALIGN uint8_t square_places[kBlock8bit];
};

// Keeps the factors in registers. As floats in memory, the stores might alias them.
struct VectorFactors8bit {
  explicit HWY_INLINE VectorFactors8bit(const Adamw8bitFactors& f)
      : grad_scale(set(f.adamw.grad_scale)),
        keep(set(f.adamw.keep)),
        beta1(set(f.beta1)),
        step_beta1(set(f.adamw.step_beta1)),
        beta2(set(f.adamw.beta2)),
        step_beta2(set(f.adamw.step_beta2)),
        step_size(set(f.adamw.step_size)),
        inv_sqrt_correction2(set(f.adamw.inv_sqrt_correction2)),
        eps(set(f.adamw.eps)) {}
  Vec grad_scale, keep, beta1, step_beta1, beta2, step_beta2, step_size, inv_sqrt_correction2, eps;
};

HWY_INLINE float largest(Vec v) { return hn::GetLane(hn::MaxOfLanes(F32(), v)); }

template <bool kSigned>
HWY_INLINE void write(const PlaceTable& table, const float* moment, uint8_t* places, float scale,
                      size_t count) {
  const Vec divisor = set(scale == 0 ? 1 : scale);
  for (size_t i = 0; i < count; i += kLanes)
    hn::StoreU(places_of<kSigned>(table, hn::Div(load(moment + i), divisor)), U8(), places + i);
}

template <class T, class TCompute>
void step_blocks(const Adamw8bitElements& e, const Adamw8bitFactors& factors, const PlaceTable& signed_table,
                 const PlaceTable& unsigned_table, const T* grads, TCompute* compute, size_t first_block,
                 size_t end_block) {
  const VectorFactors8bit f(factors);
  const bool streams = e.streams && can_stream(compute);
  Block block;
  for (size_t b = first_block; b < end_block; ++b) {
    const size_t begin = b * kBlock8bit, count = std::min(kBlock8bit, e.size - begin);
    const Vec mean_scale = set(e.mean_scales[b]), square_scale = set(e.square_scales[b]);
    const bool whole = count == kBlock8bit;
    uint8_t* mean_places = whole ? e.mean + begin : block.mean_places;
    uint8_t* square_places = whole ? e.square + begin : block.square_places;
    if (!whole) {
      std::copy_n(e.mean + begin, count, mean_places);
      std::copy_n(e.square + begin, count, square_places);
    }
    Vec largest_mean = set(0), largest_square = set(0);
    for_each_vector(count, [&](size_t j, size_t n) HWY_ATTR {
      const size_t i = begin + j;
      fetch_ahead(grads + i);
      fetch_ahead(e.weights + i);
      const Vec g = hn::Mul(load(grads + i, n), f.grad_scale);
      // Rounds in the order of the composed reference: another order moves values across a midpoint now and
      // then.
      Vec m = hn::Mul(read(signed_table, load_places(mean_places + j), mean_scale), f.beta1);
      Vec v = hn::Mul(read(unsigned_table, load_places(square_places + j), square_scale), f.beta2);
      m = hn::MulAdd(g, f.step_beta1, m);
      v = hn::MulAdd(hn::Mul(g, f.step_beta2), g, v);
      if (n < kLanes) {
        m = hn::IfThenElseZero(hn::FirstN(F32(), n), m);
        v = hn::IfThenElseZero(hn::FirstN(F32(), n), v);
      }
      store(m, block.mean + j);
      store(v, block.square + j);
      largest_mean = hn::Max(largest_mean, hn::Abs(m));
      largest_square = hn::Max(largest_square, v);
      const Vec denominator = hn::MulAdd(hn::Sqrt(v), f.inv_sqrt_correction2, f.eps);
      const Vec p =
          hn::NegMulAdd(hn::Div(m, denominator), f.step_size, hn::Mul(load(e.weights + i, n), f.keep));
      store(p, e.weights + i, n);
      store_weights(p, compute + i, n, streams);
    });
    e.mean_scales[b] = largest(largest_mean);
    e.square_scales[b] = largest(largest_square);
    write<true>(signed_table, block.mean, mean_places, e.mean_scales[b], count);
    write<false>(unsigned_table, block.square, square_places, e.square_scales[b], count);
    if (!whole) {
      std::copy_n(mean_places, count, e.mean + begin);
      std::copy_n(square_places, count, e.square + begin);
    }
  }
  if (streams) hwy::FlushStream();
}

void adamw_8bit_blocks(const Adamw8bitElements& e, const Adamw8bitFactors& factors,
                       const PlaceTable& signed_table, const PlaceTable& unsigned_table, size_t begin,
                       size_t end) {
  with_element(e.grad_dtype, [&](auto element) HWY_ATTR {
    const auto* grads = static_cast<const decltype(element)*>(e.grads);
    with_compute(e.compute, e.compute_dtype, [&](auto* compute) HWY_ATTR {
      step_blocks(e, factors, signed_table, unsigned_table, grads, compute, begin, end);
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {

HWY_EXPORT(adamw_8bit_blocks);

void adamw_8bit(const Adamw8bitElements& elements, const Adamw8bitFactors& factors,
                const PlaceTable& signed_table, const PlaceTable& unsigned_table, size_t begin, size_t end) {
  HWY_DYNAMIC_DISPATCH(adamw_8bit_blocks)(elements, factors, signed_table, unsigned_table, begin, end);
}

}  // namespace kiln::ops::cpu
#endif
