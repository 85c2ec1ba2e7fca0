#include <ATen/Parallel.h>

#include <algorithm>

#include "core/aten.h"
#include "core/cpu_level.h"
#include "core/tensors.h"
#include "ops/cpu/kernels.h"
#include "ops/gradient_memory.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"
#include "ops/pictures/convolution.h"

namespace kiln::ops {
namespace {

// How the threads share out a gradient (out, in, 3, 3).
struct GradBlocks {
  int64_t num_out = cpu::kConvOutChannels, num_in = cpu::kConvInChannels;  // of a block
  int64_t along_out, along_in;                                             // blocks

  GradBlocks(int64_t out, int64_t in) {
    divide(out, in);
    while (along_out * along_in < 2 * at::get_num_threads() && num_out > 6) {
      (num_in > 16 ? num_in : num_out) /= 2;
      divide(out, in);
    }
  }

 private:
  void divide(int64_t out, int64_t in) {
    along_out = at::divup(out, num_out);
    along_in = at::divup(in, num_in);
  }
};

void grad_weight_on_cpu(const at::Tensor& grad, const at::Tensor& x, const ConvolutionShape& shape,
                        const at::Tensor& grad_weight, const at::Tensor& scratch) {
  const auto size = [](const at::Tensor& tensor, int64_t d) { return static_cast<size_t>(tensor.size(d)); };
  const cpu::ConvGradWeight conv{.x = x.const_data_ptr(),
                                 .grad = grad.const_data_ptr(),
                                 .dtype = from_scalar_type(x.scalar_type()),
                                 .batch = size(x, 0),
                                 .height = size(x, 2),
                                 .width = size(x, 3),
                                 .in_channels = size(x, 1),
                                 .out_height = size(grad, 2),
                                 .out_width = size(grad, 3),
                                 .out_channels = size(grad, 1),
                                 .padding = static_cast<size_t>(shape.padding)};
  const GradBlocks blocks(grad.size(1), x.size(1));
  // Not in pieces: each thread has one scratch.
  at::parallel_for(0, blocks.along_out * blocks.along_in, 1, [&](int64_t begin, int64_t end) {
    float* of_thread = scratch.mutable_data_ptr<float>() + at::get_thread_num() * scratch.stride(0);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t out = i / blocks.along_in * blocks.num_out, in = i % blocks.along_in * blocks.num_in;
      cpu::conv_grad_weight(conv,
                            {.first_out = static_cast<size_t>(out),
                             .num_out = static_cast<size_t>(std::min(blocks.num_out, grad.size(1) - out)),
                             .first_in = static_cast<size_t>(in),
                             .num_in = static_cast<size_t>(std::min(blocks.num_in, x.size(1) - in))},
                            grad_weight.mutable_data_ptr(), of_thread);
    }
  });
}

constexpr Kernel<decltype(grad_weight_on_cpu)> kGradWeight{.cpu = grad_weight_on_cpu};

}  // namespace

bool has_conv_grad_weight(const at::Tensor& x, const at::Tensor& weight, const ConvolutionShape& shape) {
  constexpr int64_t kFewestChannels = 16;  // a vector of sums and more would be idle
  return kGradWeight.serving(x) && cpu_level() == CpuLevel::kAvx2 && shape.stride == 1 && shape.groups == 1 &&
         weight.size(2) == 3 && weight.size(3) == 3 && x.size(1) >= kFewestChannels && x.numel() > 0 &&
         convolution_format(x, weight) == at::MemoryFormat::ChannelsLast;
}

at::Tensor conv_grad_weight(const at::Tensor& grad_in, const at::Tensor& x_in, const at::Tensor& weight,
                            const ConvolutionShape& shape) {
  OpMark mark("kiln::conv_grad_weight", grad_in, x_in, weight);
  const at::Tensor x = x_in.contiguous(at::MemoryFormat::ChannelsLast),
                   grad = grad_in.contiguous(at::MemoryFormat::ChannelsLast),
                   memory = take_gradient_memory(weight, x.scalar_type());
  const at::Tensor grad_weight = memory.defined() ? memory : at::empty(weight.sizes(), x.options());
  const at::Tensor scratch = at::empty({at::get_num_threads(), static_cast<int64_t>(cpu::kConvScratch)},
                                       x.options().dtype(at::kFloat));
  kGradWeight.on(x)(grad, x, shape, grad_weight, scratch);
  mark.outputs(grad_weight);
  return grad_weight;
}

}  // namespace kiln::ops
