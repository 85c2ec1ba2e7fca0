// Measured with the oneDNN of torch 2.11 on processors with AVX2, AVX-512 and AMX, one and two threads, by
// watching the allocator. Each convolution makes its weight over in a layout of blocks of channels. The
// gradient of a weight comes in such a layout, is made over into a plain one and copied from there; in bf16
// it is summed up in f32, over operands that are transposed in memory, and by each thread for itself where
// the operands are much larger than the weight. AMX keeps more of its input per thread: it is off by less
// than a MiB.
#include "ops/cpu/convolution_scratch.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "ops/cpu/instruction_set.h"

namespace kiln::ops::cpu {
namespace {

constexpr int64_t kBlock = 16, kAvx2Block = 24;  // channels
constexpr int64_t kBatchBytes = 4096, kThreadBytes = 4120, kGradXBytes = 128, kGradWeightBytes = 8580;

int64_t round_up(int64_t value, int64_t multiple) { return at::divup(value, multiple) * multiple; }
int64_t element_bytes(const ConvolutionSize& size) { return size.dtype == at::kBFloat16 ? 2 : 4; }

int64_t weight_elements(const ConvolutionSize& size, int64_t out_channels, int64_t in_channels) {
  return out_channels * in_channels / size.groups * size.kernel_elements;
}

// A pair of bf16 makes one f32.
int64_t inner_channels(const ConvolutionSize& size, int64_t channels) {
  return size.dtype == at::kBFloat16 ? round_up(channels, 2) : channels;
}

// ATen convolves single small images, and points by a single thread, by matrix products of its own.
bool is_onednns(const ConvolutionSize& size) {
  if (size.dtype == at::kBFloat16 || size.groups > 1) return true;
  const bool is_small = size.batch == 1 && size.in_channels * size.in_height * size.in_width <= 20480;
  const bool is_pointwise = size.kernel_elements == 1 && !size.is_strided;
  return !is_small && !(is_pointwise && size.batch < 16 && at::get_num_threads() == 1);
}

// The patches of x as rows, where they are not x itself.
int64_t patches_bytes(const ConvolutionSize& size) {
  if (size.kernel_elements == 1 && !size.is_strided) return 0;
  return size.batch * size.in_channels * size.kernel_elements * size.out_pixels * element_bytes(size);
}

int64_t thread_bytes() { return kBatchBytes + kThreadBytes * at::get_num_threads(); }

// The f32 sums in which the gradient of a bf16 weight is accumulated.
int64_t wide_sum_bytes(const ConvolutionSize& size) {
  if (size.dtype != at::kBFloat16) return 0;
  const int64_t in_channels = round_up(size.in_channels, kBlock),
                out_channels = round_up(size.out_channels, kBlock),
                weight = weight_elements(size, out_channels, in_channels);
  const int64_t operands = in_channels * size.in_height * (size.in_width + 2 * size.padding) +
                           out_channels * size.out_pixels;  // of a sample
  const int64_t parts = size.is_strided || size.batch * operands < 2 * weight
                            ? 1
                            : std::min(size.batch, at::get_num_threads() + int64_t{0});
  return parts * (4 * weight + 2 * operands + 4 * size.out_channels) + kGradWeightBytes;
}

}  // namespace

int64_t convolution_scratch_bytes(const ConvolutionSize& size) {
  if (!is_onednns(size)) return patches_bytes(size);
  const int64_t block = chosen_avx512() ? kBlock : kAvx2Block;
  return thread_bytes() + element_bytes(size) * weight_elements(size, round_up(size.out_channels, block),
                                                                inner_channels(size, size.in_channels));
}

int64_t convolution_grad_x_scratch_bytes(const ConvolutionSize& size) {
  if (!is_onednns(size)) return patches_bytes(size);
  const int64_t block = chosen_avx512() ? kBlock : kAvx2Block;
  return thread_bytes() + kGradXBytes +
         element_bytes(size) * weight_elements(size, inner_channels(size, size.out_channels),
                                               round_up(size.in_channels, block));
}

int64_t convolution_grad_weight_scratch_bytes(const ConvolutionSize& size) {
  if (!is_onednns(size)) return patches_bytes(size);
  const int64_t plain = element_bytes(size) * weight_elements(size, size.out_channels, size.in_channels),
                blocked = element_bytes(size) *
                          weight_elements(size, round_up(size.out_channels, kBlock), size.in_channels),
                bias = element_bytes(size) * size.out_channels;
  const int64_t most = std::max(blocked + wide_sum_bytes(size) + bias, blocked + 2 * plain + 2 * bias);
  return most - plain - bias;
}

}  // namespace kiln::ops::cpu
