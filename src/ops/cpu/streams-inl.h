// Memory that a pass goes through once: prefetching, and writes around the caches. For the instruction set
// being compiled (Highway includes this once for each).
#if defined(KILN_OPS_CPU_STREAMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KILN_OPS_CPU_STREAMS_INL_H_
#undef KILN_OPS_CPU_STREAMS_INL_H_
#else
#define KILN_OPS_CPU_STREAMS_INL_H_
#endif
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

// Prefetches the memory 512 bytes ahead. The processor itself looks ahead only to the end of a page. Finding
// the next page is what a pass over f32 memory otherwise waits for (measured: a sixth of AdamW's time).
template <class T>
HWY_INLINE void fetch_ahead(const T* p) {
  hwy::Prefetch(reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(p) + 512));
}

// Prefetches `count` elements, one of the short pieces that lie a row of a tensor apart: no processor looks
// ahead to the next of those.
template <class T>
HWY_INLINE void fetch_piece(const T* p, size_t count) {
  for (size_t i = 0; i < count; i += 64 / sizeof(T)) hwy::Prefetch(p + i);
}

// Stands for the compute weights where an update writes none.
struct NoCompute {};
HWY_INLINE void store_weights(Vec, NoCompute*, size_t, bool) {}

// Stores compute weights, a whole vector around the caches if `streams`, to an aligned address: nobody reads
// them before the next step, and memory that is only written need not be read first. The pass ends with
// hwy::FlushStream(). The bits are those of a cast by ATen, which makes them when a run is resumed.
HWY_INLINE void store_weights(Vec v, Bf16* p, size_t count, bool streams) {
  const auto bits = to_bf16_bits(v);
  auto* to = reinterpret_cast<uint16_t*>(p);
  if (streams && count == kLanes) return hn::Stream(bits, U16(), to);
  HWY_ALIGN uint16_t all[kLanes];
  hn::Store(bits, U16(), all);
  std::memcpy(to, all, count * sizeof(uint16_t));
}
HWY_INLINE void store_weights(Vec v, Fp16* p, size_t count, bool streams) {
#if HWY_TARGET != HWY_SCALAR
  if (streams && count == kLanes)
    return hn::Stream(hn::BitCast(U16(), hn::DemoteTo(F16(), v)), U16(), reinterpret_cast<uint16_t*>(p));
#endif
  store(v, p, count);
}

template <class TCompute>
HWY_INLINE bool can_stream(const TCompute* p) {
  return reinterpret_cast<uintptr_t>(p) % (kLanes * sizeof(TCompute)) == 0;
}

// Calls body(weights) with the weights' own type, or NoCompute if they are null.
template <class Body>
HWY_INLINE void with_compute(void* weights, Dtype dtype, const Body& body) {
  if (weights == nullptr)
    body(static_cast<NoCompute*>(nullptr));
  else if (dtype == Dtype::kBF16)
    body(static_cast<Bf16*>(weights));
  else
    body(static_cast<Fp16*>(weights));
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#endif
