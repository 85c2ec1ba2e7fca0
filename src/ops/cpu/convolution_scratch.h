// What oneDNN takes from the tensor allocator inside a convolution: what a dry run on meta tensors would
// otherwise not see.
#pragma once
#include <ATen/core/Tensor.h>

namespace kiln::ops::cpu {

// x (B, C, H, W) with weight (O, C / groups, kh, kw) to out (B, O, h, w), f32 or bf16.
struct ConvolutionSize {
  at::ScalarType dtype = at::kFloat;
  int64_t batch = 1, in_channels = 1, out_channels = 1, kernel_elements = 1;  // kh * kw
  int64_t in_height = 1, in_width = 1, out_pixels = 1;                        // of one sample; h * w
  int64_t padding = 0, groups = 1;
  bool is_strided = false;
};

// Bytes beside the results at the peak of each part, with this process's number of threads: the result of the
// forward; the gradient of x; the gradients of the weight and the bias.
int64_t convolution_scratch_bytes(const ConvolutionSize& size);
int64_t convolution_grad_x_scratch_bytes(const ConvolutionSize& size);
int64_t convolution_grad_weight_scratch_bytes(const ConvolutionSize& size);

}  // namespace kiln::ops::cpu
