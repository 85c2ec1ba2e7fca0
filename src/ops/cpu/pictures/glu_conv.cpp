// Depthwise 3x3 convolution of SiLU and a SiLU gate, channels last. A block of channels walks down the
// picture with the activations of three rows, in f32 and bordered with zeros. So silu is computed once per
// element, and memory holds nothing but h, the result and the gradients.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/pictures/glu_conv.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/cpu/sigmoid-inl.h"
#include "ops/cpu/simd-inl.h"
#include "ops/cpu/streams-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

// Three rows of pixels with a border of one, `stride` f32 channels each: value channels, then gates.
class RowRing {
 public:
  RowRing(size_t width, size_t stride) : row_(stride * (width + 2)), stride_(stride), values_(3 * row_) {}
  // Returns row y of the picture; -1 is before the first.
  float* row(ptrdiff_t y) { return values_.data() + static_cast<size_t>(y + 3) % 3 * row_; }
  float* pixel(ptrdiff_t y, ptrdiff_t x) { return row(y) + static_cast<size_t>(x + 1) * stride_; }
  void clear(ptrdiff_t y) { std::fill_n(row(y), row_, 0.0f); }

 private:
  size_t row_, stride_;
  std::vector<float> values_;
};

// A block of channels: `count` value channels from `first`, and their gates `channels` further on.
struct Block {
  size_t first, count, padded;  // padded: `count` rounded up to whole vectors
  Block(size_t first_channel, size_t num_channels)
      : first(first_channel), count(num_channels), padded((num_channels + kLanes - 1) / kLanes * kLanes) {}
  // One vector more than the channels: pixels a power of two apart would share few sets of the first-level
  // cache.
  size_t stride() const { return 2 * padded + kLanes; }
};

// Calls body(offset in a pixel of the block, channel, number of lanes) for both halves.
template <class Body>
HWY_INLINE void for_each_channel(const GluConv& conv, const Block& block, const Body& body) {
  for (size_t half = 0; half < 2; ++half)
    for_each_vector(block.count, [&](size_t j, size_t lanes) HWY_ATTR {
      body(half * block.padded + j, half * conv.channels + block.first + j, lanes);
    });
}

template <class T>
HWY_INLINE const T* pixel_of(const GluConv& conv, const void* base, size_t y, size_t x, size_t channels) {
  return static_cast<const T*>(base) + (y * conv.width + x) * channels;
}

// Fills the ring with the activations of row y, or with zeros outside of the picture.
template <class T>
void fill_row(const GluConv& conv, const Block& block, ptrdiff_t y, RowRing& ring) {
  if (y < 0 || y >= static_cast<ptrdiff_t>(conv.height)) return ring.clear(y);
  const bool is_last = y + 1 == static_cast<ptrdiff_t>(conv.height);
  for (size_t x = 0; x < conv.width; ++x) {
    const T* from = pixel_of<T>(conv, conv.h, static_cast<size_t>(y), x, 2 * conv.channels);
    if (!is_last)
      for (size_t half = 0; half < 2; ++half)
        fetch_piece(from + (2 * conv.width + half) * conv.channels + block.first, block.count);
    float* to = ring.pixel(y, static_cast<ptrdiff_t>(x));
    for_each_channel(conv, block, [=](size_t offset, size_t channel, size_t lanes) HWY_ATTR {
      store(silu(load(from + channel, lanes)), to + offset);
    });
  }
}

// The three rows around one row of a ring. Their places do not change while that row is worked on.
class Around {
 public:
  Around(RowRing& ring, ptrdiff_t y, size_t stride)
      : rows_{ring.row(y - 1), ring.row(y), ring.row(y + 1)}, stride_(stride) {}
  // Returns the input of the kernel's `tap` at pixel x of the row.
  HWY_INLINE const float* at(size_t tap, size_t x) const { return rows_[tap / 3] + (x + tap % 3) * stride_; }

 private:
  const float* rows_[3];
  size_t stride_;
};

// Weights of one vector of channels, kept in registers while a row passes.
struct Taps {
  Vec weight[kGluTaps];
  HWY_INLINE Taps(const GluConv& conv, size_t channel, size_t lanes) {
    HWY_UNROLL(9)
    for (size_t tap = 0; tap < kGluTaps; ++tap)
      weight[tap] = load(conv.weight + tap * 2 * conv.channels + channel, lanes);
  }
  // Returns `sum` plus the convolution at pixel x.
  HWY_INLINE Vec convolve(Vec sum, const Around& around, size_t x, size_t offset) const {
    HWY_UNROLL(9)
    for (size_t tap = 0; tap < kGluTaps; ++tap)
      sum = hn::MulAdd(weight[tap], load(around.at(tap, x) + offset), sum);
    return sum;
  }
  // Returns `sum` plus the convolution with the flipped kernel, which takes gradients back.
  HWY_INLINE Vec convolve_back(Vec sum, const Around& around, size_t x, size_t offset) const {
    HWY_UNROLL(9)
    for (size_t tap = 0; tap < kGluTaps; ++tap)
      sum = hn::MulAdd(weight[tap], load(around.at(kGluTaps - 1 - tap, x) + offset), sum);
    return sum;
  }
};

// Calls body(x, offset of the vector in the block, its lanes, value, gate) for all of row y.
template <class Body>
HWY_INLINE void for_each_convolved(const GluConv& conv, const Block& block, ptrdiff_t y, RowRing& ring,
                                   const Body& body) {
  const Around around(ring, y, block.stride());
  for_each_vector(block.count, [&](size_t j, size_t lanes) HWY_ATTR {
    const size_t value_channel = block.first + j, gate_channel = conv.channels + value_channel;
    const Taps value_taps(conv, value_channel, lanes), gate_taps(conv, gate_channel, lanes);
    const Vec value_bias = load(conv.bias + value_channel, lanes),
              gate_bias = load(conv.bias + gate_channel, lanes);
    for (size_t x = 0; x < conv.width; ++x)
      body(x, j, lanes, value_taps.convolve(value_bias, around, x, j),
           gate_taps.convolve(gate_bias, around, x, block.padded + j));
  });
}

template <class T>
void forward_block(const GluConv& conv, T* out, const Block& block) {
  RowRing ring(conv.width, block.stride());
  fill_row<T>(conv, block, -1, ring);
  fill_row<T>(conv, block, 0, ring);
  for (ptrdiff_t y = 0; y < static_cast<ptrdiff_t>(conv.height); ++y) {
    fill_row<T>(conv, block, y + 1, ring);
    T* row = out + static_cast<size_t>(y) * conv.width * conv.channels + block.first;
    for_each_convolved(conv, block, y, ring,
                       [=](size_t x, size_t j, size_t lanes, Vec value, Vec gate) HWY_ATTR {
                         store(hn::Mul(value, silu(gate)), row + x * conv.channels + j, lanes);
                       });
  }
}

// Fills the ring with the gradients of the convolution's result in row y, or with zeros outside of the
// picture.
template <class T>
void fill_grad_row(const GluConv& conv, const Block& block, const T* grad, ptrdiff_t y, RowRing& ring,
                   RowRing& grads) {
  grads.clear(y);
  if (y < 0 || y >= static_cast<ptrdiff_t>(conv.height)) return;
  const T* from = pixel_of<T>(conv, grad, static_cast<size_t>(y), 0, conv.channels) + block.first;
  if (y + 1 < static_cast<ptrdiff_t>(conv.height))
    for (size_t x = 0; x < conv.width; ++x) fetch_piece(from + (conv.width + x) * conv.channels, block.count);
  float* to = grads.pixel(y, 0);
  const size_t stride = block.stride(), gates = block.padded, channels = conv.channels;
  for_each_convolved(conv, block, y, ring,
                     [=](size_t x, size_t j, size_t lanes, Vec value, Vec gate) HWY_ATTR {
                       const Vec g = load(from + x * channels + j, lanes), s = sigmoid(gate);
                       float* pixel = to + x * stride + j;
                       store(hn::Mul(g, hn::Mul(gate, s)), pixel);
                       store(hn::Mul(hn::Mul(g, value), silu_grad(gate, s)), pixel + gates);
                     });
}

// Adds row y to the sums of the gradients of weight and bias.
void add_weight_grads(const GluConv& conv, const Block& block, ptrdiff_t y, RowRing& ring, RowRing& grads,
                      float* grad_weight, float* grad_bias) {
  const Around around(ring, y, block.stride());
  const float* row = grads.pixel(y, 0);
  for_each_channel(conv, block, [&](size_t offset, size_t channel, size_t lanes) HWY_ATTR {
    Vec bias = load(grad_bias + channel, lanes);
    Vec weight[kGluTaps];
    HWY_UNROLL(9)
    for (size_t tap = 0; tap < kGluTaps; ++tap)
      weight[tap] = load(grad_weight + tap * 2 * conv.channels + channel, lanes);
    for (size_t x = 0; x < conv.width; ++x) {
      const Vec g = load(row + x * block.stride() + offset);
      bias = hn::Add(bias, g);
      HWY_UNROLL(9)
      for (size_t tap = 0; tap < kGluTaps; ++tap)
        weight[tap] = hn::MulAdd(g, load(around.at(tap, x) + offset), weight[tap]);
    }
    store(bias, grad_bias + channel, lanes);
    HWY_UNROLL(9)
    for (size_t tap = 0; tap < kGluTaps; ++tap)
      store(weight[tap], grad_weight + tap * 2 * conv.channels + channel, lanes);
  });
}

template <class T>
void write_grad_row(const GluConv& conv, const Block& block, ptrdiff_t y, RowRing& grads, T* grad_h) {
  const Around around(grads, y, block.stride());
  const size_t pixel = 2 * conv.channels, row = static_cast<size_t>(y) * conv.width * pixel;
  const T* from = static_cast<const T*>(conv.h) + row;
  T* to = grad_h + row;
  for_each_channel(conv, block, [&](size_t offset, size_t channel, size_t lanes) HWY_ATTR {
    const Taps taps(conv, channel, lanes);
    for (size_t x = 0; x < conv.width; ++x) {
      const Vec h = load(from + x * pixel + channel, lanes);
      store(hn::Mul(taps.convolve_back(set(0), around, x, offset), silu_grad(h, sigmoid(h))),
            to + x * pixel + channel, lanes);
    }
  });
}

template <class T>
void backward_block(const GluConv& conv, const T* grad, T* grad_h, float* grad_weight, float* grad_bias,
                    const Block& block) {
  RowRing ring(conv.width, block.stride()), grads(conv.width, block.stride());
  for_each_channel(conv, block, [&](size_t, size_t channel, size_t lanes) HWY_ATTR {
    store(set(0), grad_bias + channel, lanes);
    HWY_UNROLL(9)
    for (size_t tap = 0; tap < kGluTaps; ++tap)
      store(set(0), grad_weight + tap * 2 * conv.channels + channel, lanes);
  });
  const ptrdiff_t height = static_cast<ptrdiff_t>(conv.height);
  fill_row<T>(conv, block, -1, ring);
  fill_row<T>(conv, block, 0, ring);
  grads.clear(-1);
  for (ptrdiff_t y = 0; y <= height; ++y) {
    if (y < height) fill_row<T>(conv, block, y + 1, ring);
    fill_grad_row(conv, block, grad, y, ring, grads);
    if (y < height) add_weight_grads(conv, block, y, ring, grads, grad_weight, grad_bias);
    if (y > 0) write_grad_row(conv, block, y - 1, grads, grad_h);
  }
}

void glu_conv_forward(const GluConv& conv, void* out, size_t first, size_t count) {
  with_element(conv.dtype, [&](auto element) HWY_ATTR {
    forward_block(conv, static_cast<decltype(element)*>(out), Block(first, count));
  });
}

void glu_conv_backward(const GluConv& conv, const void* grad, void* grad_h, float* grad_weight,
                       float* grad_bias, size_t first, size_t count) {
  with_element(conv.dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    backward_block(conv, static_cast<const T*>(grad), static_cast<T*>(grad_h), grad_weight, grad_bias,
                   Block(first, count));
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace kiln::ops::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kiln::ops::cpu {

HWY_EXPORT(glu_conv_forward);
HWY_EXPORT(glu_conv_backward);

void glu_conv(const GluConv& conv, void* out, size_t first, size_t count) {
  HWY_DYNAMIC_DISPATCH(glu_conv_forward)(conv, out, first, count);
}

void glu_conv_grad(const GluConv& conv, const void* grad, void* grad_h, float* grad_weight, float* grad_bias,
                   size_t first, size_t count) {
  HWY_DYNAMIC_DISPATCH(glu_conv_backward)(conv, grad, grad_h, grad_weight, grad_bias, first, count);
}

}  // namespace kiln::ops::cpu
#endif
