#include <ATen/Parallel.h>

#include <algorithm>

#include "core/aten.h"
#include "core/cpu_level.h"
#include "core/tensors.h"
#include "core/threads/parallel_pieces.h"
#include "ops/cpu/instruction_set.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/pictures/convolution_kernel.h"
#include "ops/cpu/thread_scratch.h"
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

void grad_weight_by_vectors(const at::Tensor& grad, const at::Tensor& x, const ConvolutionShape& shape,
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

// As products of patches

struct PatchKernels {
  decltype(cpu::vector_pack_patches)* pack;
  decltype(cpu::vector_multiply_patches)* multiply;
};
PatchKernels patch_kernels() {
#if KILN_AVX512_KERNELS
  if (cpu::chosen_avx512()) return {cpu::avx512_pack_patches, cpu::avx512_multiply_patches};
#endif
  return {cpu::vector_pack_patches, cpu::vector_multiply_patches};
}

cpu::Conv3x3 sizes_of(const at::Tensor& x, const at::Tensor& out, const ConvolutionShape& shape) {
  return {.dtype = from_scalar_type(x.scalar_type()),
          .batch = x.size(0),
          .height = x.size(2),
          .width = x.size(3),
          .in_channels = x.size(1),
          .out_height = out.size(2),
          .out_width = out.size(3),
          .out_channels = out.size(1),
          .stride = shape.stride,
          .padding = shape.padding};
}

void multiply_patches_on_cpu(cpu::PatchProduct product, const at::Tensor& values, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, const at::Tensor& result,
                             const at::Tensor& patches) {
  product.values = values.const_data_ptr();
  product.weight = weight.const_data_ptr();
  product.bias = bias ? bias->const_data_ptr() : nullptr;
  product.result = result.mutable_data_ptr();
  void* const memory = patches.mutable_data_ptr();
  const PatchKernels kernels = patch_kernels();
  parallel_pieces(cpu::num_patch_pieces(product), 1,
                  [&](int64_t piece, int64_t) { kernels.pack(product, piece, memory); });
  // The pieces of the same rows follow each other, so that these stay in a cache.
  const int64_t along_rows = at::divup(product.rows(), cpu::kPatchRows),
                along_pixels = at::divup(product.pixels(), cpu::kPatchPixels);
  parallel_pieces(along_rows * along_pixels, 1, [&](int64_t piece, int64_t) {
    kernels.multiply(product, memory, piece / along_pixels * cpu::kPatchRows,
                     piece % along_pixels * cpu::kPatchPixels);
  });
}

void grad_weight_by_patches(cpu::WeightGradient product, const at::Tensor& grad, const at::Tensor& x,
                            const at::Tensor& grad_weight, const at::Tensor& packed) {
  product.x = x.const_data_ptr();
  product.grad = grad.const_data_ptr();
  product.result = grad_weight.mutable_data_ptr();
  void* const memory = packed.mutable_data_ptr();
  parallel_pieces(product.pixels(), cpu::kGradPixels,
                  [&](int64_t pixel, int64_t) { cpu::pack_grad(product, pixel, memory); });
  // Few input channels make too few pieces, so output channels are divided as well.
  constexpr int64_t kFewestChannels = 96, kPieces = 32;
  const int64_t out = grad.size(1), along_in = at::divup(x.size(1), cpu::kGradChannels),
                divided = std::clamp<int64_t>(out / kFewestChannels, 1, at::divup(kPieces, along_in)),
                num_out = at::divup(at::divup(out, divided), cpu::kGradRows) * cpu::kGradRows,
                along_out = at::divup(out, num_out);
  const auto scratch_bytes = static_cast<size_t>(cpu::weight_gradient_scratch(product));
  parallel_pieces(along_in * along_out, 1, [&](int64_t piece, int64_t) {
    const int64_t first_out = piece / along_in * num_out;
    cpu::multiply_grad(product, memory, piece % along_in * cpu::kGradChannels, first_out,
                       std::min(num_out, out - first_out), cpu::thread_scratch(scratch_bytes));
  });
}

constexpr Kernel<decltype(grad_weight_by_vectors)> kGradWeightByVectors{.cpu = grad_weight_by_vectors};
constexpr Kernel<decltype(grad_weight_by_patches)> kGradWeightByPatches{.cpu = grad_weight_by_patches};
constexpr Kernel<decltype(multiply_patches_on_cpu)> kPatches{.cpu = multiply_patches_on_cpu};

constexpr int64_t kFewestChannels = 16;  // fewer leave lanes idle
// Most pixels of the result in a batch. oneDNN brings the whole weight into another order first. For 256
// pixels that takes as long as a third of the products, and for more oneDNN is as fast or faster. This was
// measured with AVX2 and with AVX-512. With matrix tiles it was not: products are faster there, so that the
// order weighs more.
constexpr int64_t kMostPixels = 256, kMostGradPixels = 1024;

int64_t num_pixels(at::IntArrayRef sizes) { return sizes[0] * sizes[2] * sizes[3]; }
int64_t side_of_result(int64_t side, const ConvolutionShape& shape) {
  return (side + 2 * shape.padding - 3) / shape.stride + 1;
}
int64_t num_result_pixels(const at::Tensor& x, const ConvolutionShape& shape) {
  return x.size(0) * side_of_result(x.size(2), shape) * side_of_result(x.size(3), shape);
}

// True for a 3x3 kernel on channels-last pictures. `values` are x or the gradient of the result.
bool is_3x3(const at::Tensor& values, at::MemoryFormat format, const at::Tensor& weight,
            const ConvolutionShape& shape) {
  return has_cpu_kernel(values) && format == at::MemoryFormat::ChannelsLast && shape.groups == 1 &&
         weight.size(2) == 3 && weight.size(3) == 3 && weight.size(1) >= kFewestChannels &&
         values.numel() > 0 && weight.is_contiguous();
}

// True if AVX-512's kernels, or those of matrix tiles, take the dtype and the channels.
bool has_avx512(at::ScalarType dtype, const at::Tensor& weight) {
  if (!KILN_AVX512_KERNELS || !cpu::chosen_avx512()) return false;
  if (dtype == at::kFloat) return true;
  const int64_t divisor = cpu::has_matrix_tiles() ? cpu::kTileChannels : 2;
  return dtype == at::kBFloat16 && cpu_level() >= CpuLevel::kAvx512Bf16 && weight.size(0) % divisor == 0 &&
         weight.size(1) % divisor == 0;
}

// True if a result of so many pixels is computed as a product of patches.
bool has_patches(at::ScalarType dtype, const at::Tensor& weight, int64_t pixels) {
  const bool has_kernel =
      has_avx512(dtype, weight) || (dtype == at::kFloat && cpu_level() == CpuLevel::kAvx2);
  return has_kernel && pixels <= kMostPixels;
}

// Fills `out` with the product.
void multiply_patches(const cpu::PatchProduct& product, const at::Tensor& values, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, const at::Tensor& out) {
  const at::Tensor patches = at::empty({cpu::patches_bytes(product)}, values.options().dtype(at::kByte));
  kPatches.on(values)(product, values, weight, bias, out, patches);
}

}  // namespace

bool has_conv_forward(const at::Tensor& x, const at::Tensor& weight, const ConvolutionShape& shape) {
  return is_3x3(x, convolution_format(x, weight), weight, shape) &&
         has_patches(x.scalar_type(), weight, num_result_pixels(x, shape));
}

bool has_conv_grad_x(at::ScalarType dtype, const at::Tensor& grad, at::IntArrayRef sizes,
                     at::MemoryFormat format, const at::Tensor& weight, const ConvolutionShape& shape) {
  return is_3x3(grad, format, weight, shape) && shape.stride == 1 &&
         has_patches(dtype, weight, num_pixels(sizes));
}

bool has_conv_grad_weight(const at::Tensor& x, const at::Tensor& weight, const ConvolutionShape& shape) {
  if (!is_3x3(x, convolution_format(x, weight), weight, shape)) return false;
  if (has_avx512(x.scalar_type(), weight)) return num_result_pixels(x, shape) <= kMostGradPixels;
  return cpu_level() == CpuLevel::kAvx2 && shape.stride == 1;
}

at::Tensor conv_forward(const at::Tensor& x_in, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias, const ConvolutionShape& shape) {
  OpMark mark("kiln::conv_forward", x_in, weight);
  const at::Tensor x = x_in.contiguous(at::MemoryFormat::ChannelsLast);
  at::Tensor out = at::empty(
      {x.size(0), weight.size(0), side_of_result(x.size(2), shape), side_of_result(x.size(3), shape)},
      x.options(), at::MemoryFormat::ChannelsLast);
  multiply_patches({.conv = sizes_of(x, out, shape), .is_grad_x = false}, x, weight, bias, out);
  mark.outputs(out);
  return out;
}

at::Tensor conv_grad_x(const at::Tensor& grad_in, at::IntArrayRef sizes, const at::Tensor& weight,
                       const ConvolutionShape& shape) {
  OpMark mark("kiln::conv_grad_x", grad_in, weight);
  const at::Tensor grad = grad_in.contiguous(at::MemoryFormat::ChannelsLast);
  at::Tensor grad_x = at::empty(sizes, grad.options(), at::MemoryFormat::ChannelsLast);
  multiply_patches({.conv = sizes_of(grad_x, grad, shape), .is_grad_x = true}, grad, weight, std::nullopt,
                   grad_x);
  mark.outputs(grad_x);
  return grad_x;
}

at::Tensor conv_grad_weight(const at::Tensor& grad_in, const at::Tensor& x_in, const at::Tensor& weight,
                            const ConvolutionShape& shape) {
  OpMark mark("kiln::conv_grad_weight", grad_in, x_in, weight);
  const at::Tensor x = x_in.contiguous(at::MemoryFormat::ChannelsLast),
                   grad = grad_in.contiguous(at::MemoryFormat::ChannelsLast),
                   memory = take_gradient_memory(weight, x.scalar_type());
  const at::Tensor grad_weight = memory.defined() ? memory : at::empty(weight.sizes(), x.options());
  if (has_avx512(x.scalar_type(), weight)) {
    const cpu::WeightGradient product{.conv = sizes_of(x, grad, shape)};
    kGradWeightByPatches.on(x)(product, grad, x, grad_weight,
                               at::empty({cpu::packed_grad_bytes(product)}, x.options().dtype(at::kByte)));
  } else {
    kGradWeightByVectors.on(x)(grad, x, shape, grad_weight,
                               at::empty({at::get_num_threads(), static_cast<int64_t>(cpu::kConvScratch)},
                                         x.options().dtype(at::kFloat)));
  }
  mark.outputs(grad_weight);
  return grad_weight;
}

}  // namespace kiln::ops
