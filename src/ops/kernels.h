// The tensors that the hand-written kernels take.
#pragma once
#include <ATen/core/Tensor.h>

namespace kiln::ops {

// True for f32, bf16 or fp16 on the CPU, on meta, or on CUDA where the kernels are compiled in. On meta a
// kernel's wrapper allocates as it would elsewhere and computes nothing. Any other tensor takes the composed
// way.
bool has_kernel(const at::Tensor& tensor);

// True on a CPU, or on meta in a dry run that stands for one.
bool computes_on_cpu(const at::Tensor& tensor);
// True on a GPU, or on meta in a dry run that stands for one.
bool computes_on_cuda(const at::Tensor& tensor);

// True for f32, bf16 or fp16 on a CPU, or on meta but for a dry run of a GPU: what has a kernel there alone.
bool has_cpu_kernel(const at::Tensor& tensor);

// Returns the dtype in which products of `dtype` are computed on a device, or on meta in a dry run of it:
// cpu_product_dtype() on a CPU.
at::ScalarType product_dtype(at::Device device, at::ScalarType dtype);

// True for f32, bf16 or fp16.
bool is_kernel_dtype(at::ScalarType dtype);

}  // namespace kiln::ops
