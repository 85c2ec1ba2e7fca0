// 2 x 2 pixels as four channels beside each other, and back; means of neighbouring channels.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/pictures/pixel_shuffle.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstdint>

#include "ops/cpu/kernels.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

// Calls body(value) with an unsigned value of the size of an element.
template <class Body>
HWY_INLINE void with_size(Dtype dtype, const Body& body) {
  dtype_size(dtype) == 4 ? body(uint32_t()) : body(uint16_t());
}

void pixels_to_channels_row(Dtype dtype, const void* top, const void* bottom, void* out, size_t width,
                            size_t channels) {
  with_size(dtype, [&](auto value) HWY_ATTR {
    using T = decltype(value);
    const hn::ScalableTag<T> d;
    const T *first = static_cast<const T*>(top), *second = static_cast<const T*>(bottom);
    T* to = static_cast<T*>(out);
    for (size_t x = 0; x < width; ++x, first += 2 * channels, second += 2 * channels, to += 4 * channels) {
      const T* from[] = {first, first + channels, second, second + channels};
      size_t c = 0;
      for (; c + hn::Lanes(d) <= channels; c += hn::Lanes(d))
        hn::StoreInterleaved4(hn::LoadU(d, from[0] + c), hn::LoadU(d, from[1] + c), hn::LoadU(d, from[2] + c),
                              hn::LoadU(d, from[3] + c), d, to + 4 * c);
      for (; c < channels; ++c)
        for (size_t i = 0; i < 4; ++i) to[4 * c + i] = from[i][c];
    }
  });
}

// Loads a vector of each of the four pixels, whose values stand kRepeats times beside each other.
template <size_t kRepeats, class D, class V>
HWY_INLINE void load_pixels(D d, const hn::TFromD<D>* from, V (&of_pixel)[4]) {
  if constexpr (kRepeats == 1) {
    hn::LoadInterleaved4(d, from, of_pixel[0], of_pixel[1], of_pixel[2], of_pixel[3]);
  } else if constexpr (kRepeats == 2) {
    hn::LoadInterleaved2(d, from, of_pixel[0], of_pixel[2]);
    of_pixel[1] = of_pixel[0];
    of_pixel[3] = of_pixel[2];
  } else {
    of_pixel[0] = of_pixel[1] = of_pixel[2] = of_pixel[3] = hn::LoadU(d, from);
  }
}

template <size_t kRepeats, class T>
void channels_to_pixels_of(const T* from, T* first, T* second, size_t width, size_t channels) {
  const hn::ScalableTag<T> d;
  constexpr size_t kValues = 4 / kRepeats;
  for (size_t x = 0; x < width;
       ++x, from += kValues * channels, first += 2 * channels, second += 2 * channels) {
    T* to[] = {first, first + channels, second, second + channels};
    size_t c = 0;
    for (; c + hn::Lanes(d) <= channels; c += hn::Lanes(d)) {
      hn::Vec<decltype(d)> of_pixel[4];
      load_pixels<kRepeats>(d, from + kValues * c, of_pixel);
      for (size_t i = 0; i < 4; ++i) hn::StoreU(of_pixel[i], d, to[i] + c);
    }
    for (; c < channels; ++c)
      for (size_t i = 0; i < 4; ++i) to[i][c] = from[kValues * c + i / kRepeats];
  }
}

void channels_to_pixels_row(Dtype dtype, const void* in, void* top, void* bottom, size_t width,
                            size_t channels, size_t repeats) {
  with_size(dtype, [&](auto value) HWY_ATTR {
    using T = decltype(value);
    const T* from = static_cast<const T*>(in);
    T *first = static_cast<T*>(top), *second = static_cast<T*>(bottom);
    if (repeats == 1) return channels_to_pixels_of<1>(from, first, second, width, channels);
    if (repeats == 2) return channels_to_pixels_of<2>(from, first, second, width, channels);
    channels_to_pixels_of<4>(from, first, second, width, channels);
  });
}

// The sums of neighbouring lanes of `low`, then of `high`.
HWY_INLINE Vec sums_of_pairs(Vec low, Vec high) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Add(low, high);
#else
  return hn::Add(hn::ConcatEven(F32(), high, low), hn::ConcatOdd(F32(), high, low));
#endif
}

void mean_of_pairs_range(Dtype dtype, const void* in, void* out, size_t n) {
  with_element(dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    const T* from = static_cast<const T*>(in);
    T* to = static_cast<T*>(out);
    for_each_vector(n, [=](size_t i, size_t count) HWY_ATTR {
      const size_t first = std::min(kLanes, 2 * count);
      const Vec low = load(from + 2 * i, first), high = load(from + 2 * i + first, 2 * count - first);
      store(hn::Mul(sums_of_pairs(low, high), set(0.5f)), to + i, count);
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {

HWY_EXPORT(pixels_to_channels_row);
HWY_EXPORT(channels_to_pixels_row);
HWY_EXPORT(mean_of_pairs_range);

void pixels_to_channels(Dtype dtype, const void* top, const void* bottom, void* out, size_t width,
                        size_t channels) {
  HWY_DYNAMIC_DISPATCH(pixels_to_channels_row)(dtype, top, bottom, out, width, channels);
}

void channels_to_pixels(Dtype dtype, const void* in, void* top, void* bottom, size_t width, size_t channels,
                        size_t repeats) {
  HWY_DYNAMIC_DISPATCH(channels_to_pixels_row)(dtype, in, top, bottom, width, channels, repeats);
}

void mean_of_pairs(Dtype dtype, const void* in, void* out, size_t n) {
  HWY_DYNAMIC_DISPATCH(mean_of_pairs_range)(dtype, in, out, n);
}

}  // namespace kiln::ops::cpu
#endif
