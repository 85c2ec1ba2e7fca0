// Depthwise 3x3 convolution of SiLU and a SiLU gate, channels last. A block of channels walks down the
// picture with the activations of three rows, in f32 and bordered with zeros, so that silu is computed once
// per element and nothing but h, the result and the gradients is in memory.
#include "ops/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/glu_conv.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <vector>

#include "ops/cpu/glu_conv.h"
#include "ops/cpu/sigmoid-inl.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kiln::ops::cpu {
namespace HWY_NAMESPACE {

// Three rows of pixels with a border of one, `stride` f32 channels each: value channels, then gates.
class RowRing {
 public:
  RowRing(size_t width, size_t stride) : row_(stride * (width + 2)), stride_(stride), values_(3 * row_) {}
  // Row y of the picture; -1 is before the first.
  float* row(ptrdiff_t y) { return values_.data() + static_cast<size_t>(y + 3) % 3 * row_; }
  float* pixel(ptrdiff_t y, ptrdiff_t x) { return row(y) + static_cast<size_t>(x + 1) * stride_; }
  void clear(ptrdiff_t y) { std::fill_n(row(y), row_, 0.0f); }

 private:
  size_t row_, stride_;
  std::vector<float> values_;
};

// What a block of channels is: `count` value channels from `first`, their gates `channels` further on.
struct Block {
  size_t first, count, padded;  // padded: whole vectors
  Block(size_t first_channel, size_t num_channels)
      : first(first_channel), count(num_channels), padded((num_channels + kLanes - 1) / kLanes * kLanes) {}
  size_t stride() const { return 2 * padded; }
};

// body(offset in a pixel of the block, channel, number of lanes) for both halves.
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

// Activations of row y; zeros outside of the picture.
template <class T>
void fill_row(const GluConv& conv, const Block& block, ptrdiff_t y, RowRing& ring) {
  if (y < 0 || y >= static_cast<ptrdiff_t>(conv.height)) return ring.clear(y);
  for (size_t x = 0; x < conv.width; ++x) {
    const T* from = pixel_of<T>(conv, conv.h, static_cast<size_t>(y), x, 2 * conv.channels);
    float* to = ring.pixel(y, static_cast<ptrdiff_t>(x));
    for_each_channel(conv, block, [=](size_t offset, size_t channel, size_t lanes) HWY_ATTR {
      store(silu(load(from + channel, lanes)), to + offset);
    });
  }
}

// The convolution at one vector of channels of pixel (y, x).
HWY_INLINE Vec convolved(const GluConv& conv, RowRing& ring, ptrdiff_t y, ptrdiff_t x, size_t offset,
                         size_t channel, size_t lanes) {
  Vec sum = load(conv.bias + channel, lanes);
  for (ptrdiff_t dy = -1; dy <= 1; ++dy)
    for (ptrdiff_t dx = -1; dx <= 1; ++dx) {
      const size_t tap = static_cast<size_t>(3 * (dy + 1) + dx + 1);
      sum = hn::MulAdd(load(conv.weight + tap * 2 * conv.channels + channel, lanes),
                       load(ring.pixel(y + dy, x + dx) + offset), sum);
    }
  return sum;
}

template <class T>
void forward_block(const GluConv& conv, T* out, const Block& block) {
  RowRing ring(conv.width, block.stride());
  fill_row<T>(conv, block, -1, ring);
  fill_row<T>(conv, block, 0, ring);
  for (ptrdiff_t y = 0; y < static_cast<ptrdiff_t>(conv.height); ++y) {
    fill_row<T>(conv, block, y + 1, ring);
    for (ptrdiff_t x = 0; x < static_cast<ptrdiff_t>(conv.width); ++x) {
      T* to =
          out + static_cast<size_t>(y * static_cast<ptrdiff_t>(conv.width) + x) * conv.channels + block.first;
      for_each_vector(block.count, [&](size_t j, size_t lanes) HWY_ATTR {
        const Vec value = convolved(conv, ring, y, x, j, block.first + j, lanes);
        const Vec gate =
            convolved(conv, ring, y, x, block.padded + j, conv.channels + block.first + j, lanes);
        store(hn::Mul(value, silu(gate)), to + j, lanes);
      });
    }
  }
}

// silu'(x) = s (1 + x (1 - s)), s = sigmoid(x)
HWY_INLINE Vec silu_grad(Vec x) {
  const Vec s = hn::Div(set(1.0f), hn::Add(set(1.0f), exp2(hn::Mul(x, set(-kLog2E)))));
  return hn::Mul(s, hn::MulAdd(x, hn::Sub(set(1.0f), s), set(1.0f)));
}

// Gradients of the convolution's result in row y; zeros outside of the picture.
template <class T>
void fill_grad_row(const GluConv& conv, const Block& block, const T* grad, ptrdiff_t y, RowRing& ring,
                   RowRing& grads) {
  grads.clear(y);
  if (y < 0 || y >= static_cast<ptrdiff_t>(conv.height)) return;
  for (ptrdiff_t x = 0; x < static_cast<ptrdiff_t>(conv.width); ++x) {
    const T* from = pixel_of<T>(conv, grad, static_cast<size_t>(y), static_cast<size_t>(x), conv.channels);
    float* to = grads.pixel(y, x);
    for_each_vector(block.count, [&](size_t j, size_t lanes) HWY_ATTR {
      const Vec g = load(from + block.first + j, lanes);
      const Vec value = convolved(conv, ring, y, x, j, block.first + j, lanes);
      const Vec gate = convolved(conv, ring, y, x, block.padded + j, conv.channels + block.first + j, lanes);
      store(hn::Mul(g, silu(gate)), to + j);
      store(hn::Mul(hn::Mul(g, value), silu_grad(gate)), to + block.padded + j);
    });
  }
}

// Adds row y to the sums of the gradients of weight and bias.
void add_weight_grads(const GluConv& conv, const Block& block, ptrdiff_t y, RowRing& ring, RowRing& grads,
                      float* grad_weight, float* grad_bias) {
  for_each_channel(conv, block, [&](size_t offset, size_t channel, size_t lanes) HWY_ATTR {
    Vec bias = load(grad_bias + channel, lanes);
    Vec weight[kGluTaps];
    for (size_t tap = 0; tap < kGluTaps; ++tap)
      weight[tap] = load(grad_weight + tap * 2 * conv.channels + channel, lanes);
    for (ptrdiff_t x = 0; x < static_cast<ptrdiff_t>(conv.width); ++x) {
      const Vec g = load(grads.pixel(y, x) + offset);
      bias = hn::Add(bias, g);
      for (ptrdiff_t tap = 0; tap < static_cast<ptrdiff_t>(kGluTaps); ++tap)
        weight[tap] = hn::MulAdd(g, load(ring.pixel(y + tap / 3 - 1, x + tap % 3 - 1) + offset), weight[tap]);
    }
    store(bias, grad_bias + channel, lanes);
    for (size_t tap = 0; tap < kGluTaps; ++tap)
      store(weight[tap], grad_weight + tap * 2 * conv.channels + channel, lanes);
  });
}

template <class T>
void write_grad_row(const GluConv& conv, const Block& block, ptrdiff_t y, RowRing& grads, T* grad_h) {
  for (ptrdiff_t x = 0; x < static_cast<ptrdiff_t>(conv.width); ++x) {
    const size_t pixel = static_cast<size_t>(y * static_cast<ptrdiff_t>(conv.width) + x) * 2 * conv.channels;
    const T* from = static_cast<const T*>(conv.h) + pixel;
    T* to = grad_h + pixel;
    for_each_channel(conv, block, [&](size_t offset, size_t channel, size_t lanes) HWY_ATTR {
      Vec sum = set(0);
      for (ptrdiff_t tap = 0; tap < static_cast<ptrdiff_t>(kGluTaps); ++tap)
        sum = hn::MulAdd(load(conv.weight + static_cast<size_t>(tap) * 2 * conv.channels + channel, lanes),
                         load(grads.pixel(y + 1 - tap / 3, x + 1 - tap % 3) + offset), sum);
      store(hn::Mul(sum, silu_grad(load(from + channel, lanes))), to + channel, lanes);
    });
  }
}

template <class T>
void backward_block(const GluConv& conv, const T* grad, T* grad_h, float* grad_weight, float* grad_bias,
                    const Block& block) {
  RowRing ring(conv.width, block.stride()), grads(conv.width, block.stride());
  for_each_channel(conv, block, [&](size_t, size_t channel, size_t lanes) HWY_ATTR {
    store(set(0), grad_bias + channel, lanes);
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
