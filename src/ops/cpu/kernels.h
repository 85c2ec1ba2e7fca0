// CPU kernels in plain pointers, without torch. Each handles a range of its work, so the caller chooses the
// threads. No result depends on the number of threads. Element types are f32, bf16 and fp16; arithmetic is
// f32.
#pragma once
#include <cstddef>

#include "core/dtype.h"
#include "ops/kernel_args.h"

namespace kiln::ops::cpu {

// Elements [0, n): out = gelu_tanh(in), of one dtype.
void gelu_tanh(Dtype dtype, const void* in, void* out, size_t n);

// Elements [0, n): grad_in = grad * gelu_tanh'(in), of one dtype; grad_in may be grad.
void gelu_tanh_grad(Dtype dtype, const void* grad, const void* in, void* grad_in, size_t n);

// out (rows, width) = h[:, :width] * gelu(h[:, width:]) with the exact (erf) GELU, h (rows, 2 width); and the
// gradient of h.
void geglu(Dtype dtype, const void* h, void* out, size_t rows, size_t width);
void geglu_grad(Dtype dtype, const void* grad, const void* h, void* grad_h, size_t rows, size_t width);

// adaLN forward: computes rows [row_begin, row_end) of `out`, and their mean and rstd.
void adaln(const AdalnArgs& args, void* out, Dtype out_dtype, size_t row_begin, size_t row_end);

// adaLN backward: computes dx of rows [row_begin, row_end), all of one batch, and the sums of d shift and d
// scale over these rows (width each). `around` is a gradient of x's dtype that is added to dx, or null.
void adaln_grad(const AdalnArgs& args, const void* grad, Dtype grad_dtype, const void* around, void* dx,
                float* dshift, float* dscale, size_t row_begin, size_t row_end);

// Computes rows [row_begin, row_end) of `out`; x and out have one dtype.
void gated_residual(const GatedResidualArgs& args, const void* x, void* out, Dtype x_dtype, size_t row_begin,
                    size_t row_end);

// Computes dy of rows [row_begin, row_end), all of one batch, and the sum of d gate over these rows (width).
void gated_residual_grad(const GatedResidualArgs& args, const void* grad, Dtype grad_dtype, void* dy,
                         float* dgate, size_t row_begin, size_t row_end);

// out[j] = sum over c of partials[c * stride + j], in order of c.
void sum_partials(const float* partials, size_t count, size_t stride, void* out, Dtype out_dtype,
                  size_t width);

// Updates the elements [begin, end).
void adamw(const AdamwElements& elements, const AdamwFactors& factors, size_t begin, size_t end);

// Returns the sum of squares of n elements in f64, by 16 interleaved sums on every instruction set.
double sum_of_squares(Dtype dtype, const void* values, size_t n);

// GroupNorm over one (batch, group) of a contiguous tensor: `channels` rows of `pixels` elements each.
void group_norm_contiguous(const void* x, void* out, Dtype dtype, const float* weight, const float* bias,
                           float eps, bool silu, size_t channels, size_t pixels);

// Channels-last: computes the mean and the sum of squared deviations of every channel over `pixels` pixels of
// `channels` elements.
void channel_moments(const void* x, Dtype dtype, double* mean, double* m2, size_t channels, size_t pixels);

// Channels-last: out = act(x * factor[c] + offset[c]).
void channel_affine(const void* x, void* out, Dtype dtype, const float* factor, const float* offset,
                    bool silu, size_t channels, size_t pixels);

// A picture's channels-last GroupNorm, act(x * factor[c] + offset[c]), as its backward reads it.
struct ChannelNorm {
  Dtype dtype;  // of x, its gradient and that of the result
  bool silu;
  size_t channels;
  const float *factor, *offset, *mean;  // of each channel
};

// With d = grad * act'(x * factor + offset), computes the sums of d and of d * (x - mean) over `pixels`
// pixels.
void channel_grad_sums(const ChannelNorm& norm, const void* x, const void* grad, float* sums, float* sums_x,
                       size_t pixels);

// grad_x = d * factor[c] + (x - mean[c]) * slope[c] + shift[c].
void channel_grad(const ChannelNorm& norm, const void* x, const void* grad, const float* slope,
                  const float* shift, void* grad_x, size_t pixels);

// out = x / sqrt(mean(x^2) + eps) * weight + bias of rows of `width` elements, x and out of one dtype.
struct RmsNormRows {
  Dtype dtype;
  size_t width;
  const float *weight, *bias;  // (width); bias may be null
  float eps;
};
void rms_norm(const RmsNormRows& norm, const void* x, void* out, size_t rows);

// Elements [0, n): out = in * sigmoid(in), of one dtype; out may be in.
void silu(Dtype dtype, const void* in, void* out, size_t n);

// Two rows (2 width, channels) of channels-last pixels -> out (width, 4 channels): channel 4 c + 2 y + x has
// the pixel at y and x of its 2 x 2. And back, where each value of `in` (width, 4 channels / repeats) counts
// `repeats` times, 1, 2 or 4.
void pixels_to_channels(Dtype dtype, const void* top, const void* bottom, void* out, size_t width,
                        size_t channels);
void channels_to_pixels(Dtype dtype, const void* in, void* top, void* bottom, size_t width, size_t channels,
                        size_t repeats);

// out[i] = (in[2 i] + in[2 i + 1]) / 2 for i < n, of one dtype.
void mean_of_pairs(Dtype dtype, const void* in, void* out, size_t n);

// sums[j] = sum over i < rows of values[i * width + j], in f32 and in order of i.
void column_sum(Dtype dtype, const void* values, size_t rows, size_t width, float* sums);

// The depthwise 3x3 convolution and gate of a GLUMBConv on one block of channels of one picture.

inline constexpr size_t kGluTaps = 9;  // weights of a 3x3 kernel, row-major
// Most channels of a block. Three rows of them stay in the second-level cache.
inline constexpr size_t kGluBlockChannels = 64;

struct GluConv {
  const void* h;        // (height * width, 2 * channels)
  Dtype dtype;          // of h, the result and gradients
  const float* weight;  // (kGluTaps, 2 * channels)
  const float* bias;    // (2 * channels)
  size_t height, width, channels;
};

// Computes channels [first, first + count) of out (height * width, channels). count <= kGluBlockChannels.
void glu_conv(const GluConv& conv, void* out, size_t first, size_t count);

// Computes the gradient of h, and the sums over the picture of the gradients of weight and bias, laid out
// like these, for channels [first, first + count) and their gates.
void glu_conv_grad(const GluConv& conv, const void* grad, void* grad_h, float* grad_weight, float* grad_bias,
                   size_t first, size_t count);

// The gradient of the weight of a 3x3 convolution of channels-last pixels with stride 1, block by block.

inline constexpr size_t kConvTaps = 9;  // weights of a 3x3 kernel, row-major
// Most channels of a block, results that are summed at once, and pixels that they read. The sums and pixels
// of a block stay in the second-level cache.
inline constexpr size_t kConvOutChannels = 48, kConvInChannels = 64, kConvResults = 256, kConvPixels = 520;
// Floats of 64-byte aligned scratch for a block.
inline constexpr size_t kConvScratch =
    kConvOutChannels * (kConvTaps * kConvInChannels + kConvResults) + kConvPixels * kConvInChannels;

struct ConvGradWeight {
  const void* x;     // (batch, height, width, in_channels)
  const void* grad;  // of the result, (batch, out_height, out_width, out_channels)
  Dtype dtype;       // of both and of the weight's gradient
  size_t batch, height, width, in_channels, out_height, out_width, out_channels, padding;
};

// At most kConvOutChannels by kConvInChannels.
struct ConvBlock {
  size_t first_out, num_out, first_in, num_in;
};

// Computes a block of grad_weight (out_channels, in_channels, 3, 3). Each element is one f32 sum over all
// pixels in their order.
void conv_grad_weight(const ConvGradWeight& conv, const ConvBlock& block, void* grad_weight, float* scratch);

// The tokens of one attention head in a tensor of tokens: rows of head_dim elements, `stride` elements apart.
struct HeadTokens {
  void* data;
  size_t stride;
};

// Linear attention of one head with ReLU features.

struct LinearAttentionShape {
  Dtype dtype;  // of all tokens
  size_t num_tokens, head_dim;
};

void linear_attention(const LinearAttentionShape& shape, HeadTokens q, HeadTokens k, HeadTokens v,
                      HeadTokens out);

void linear_attention_grad(const LinearAttentionShape& shape, HeadTokens q, HeadTokens k, HeadTokens v,
                           HeadTokens grad, HeadTokens grad_q, HeadTokens grad_k, HeadTokens grad_v);

}  // namespace kiln::ops::cpu
