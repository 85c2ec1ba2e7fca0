// What the devices do inside the operations, and the one place that chooses among them. An operation has its
// contract, its memory, its autograd node and its mark, each written once. What fills the memory is a row of
// functions, one for each device: kRow.on(x)(...). In a dry run tensors are on meta and stand for those of a
// device. A planned device computes nothing; what kernels and libraries allocate there beside the operation's
// memory stands in ops/planned/.
#pragma once
#include <ATen/core/Tensor.h>

#include <concepts>

#include "core/tensors.h"
#include "core/threads/parallel_pieces.h"

namespace kiln::ops {

// True for f32, bf16 or fp16, which the hand-written kernels take.
bool is_kernel_dtype(at::ScalarType dtype);
// True for these dtypes on any device, but on CUDA only where the kernels are compiled in.
bool has_kernel(const at::Tensor& tensor);

// A planned kernel that allocates nothing.
template <class Result, class... Args>
Result nothing(Args...) {
  return Result();
}

// A row. Null: the device has no such kernel, and the operation is composed of ATen's.
template <class Function>
struct Kernel {
  // A function that may be missing. It is told, not asked of the address: with GCC's sanitizers no comparison
  // of a function's address is a constant.
  struct Entry {
    Function* function = nullptr;
    bool is_given = false;

    constexpr Entry() = default;
    constexpr Entry(Function* given) : function(given), is_given(true) {}
    template <std::convertible_to<Function*> Lambda>
    constexpr Entry(Lambda given) : Entry(static_cast<Function*>(given)) {}
    constexpr operator Function*() const { return function; }
  };
  static constexpr Function* kNothing = nothing;

  Entry cpu, cuda;
  Entry planned_cpu = cpu.is_given ? Entry(kNothing) : Entry();
  Entry planned_cuda = cuda.is_given ? Entry(kNothing) : Entry();

  // Takes nanoseconds.
  Function* on(at::Device device) const {
    const bool on_gpu = computing_device(device) == at::kCUDA;
    if (device.is_meta()) return on_gpu ? planned_cuda : planned_cpu;
    return on_gpu ? cuda : cpu;
  }
  Function* on(const at::Tensor& tensor) const { return on(tensor.device()); }
  // The same for hand-written kernels: null as well where has_kernel() is false.
  Function* serving(const at::Tensor& tensor) const { return has_kernel(tensor) ? on(tensor) : nullptr; }
};

// The loop of kernels that a CPU alone has.
inline constexpr Kernel<decltype(parallel_pieces)> kLoop{.cpu = parallel_pieces, .cuda = {}};
inline bool has_cpu_kernel(const at::Tensor& tensor) { return kLoop.serving(tensor) != nullptr; }

// Returns the row of a function that is one on a CPU and on a GPU, and `planned` on both planned devices.
template <class Function>
constexpr Kernel<Function> on_all(Function* real, Function* planned) {
  return {.cpu = real, .cuda = real, .planned_cpu = planned, .planned_cuda = planned};
}

// True on a CPU, or on meta in a dry run that stands for one.
bool computes_on_cpu(const at::Tensor& tensor);
// True on a GPU, or on meta in a dry run that stands for one.
bool computes_on_cuda(const at::Tensor& tensor);
// Returns the format that a convolution gives its result.
at::MemoryFormat convolution_format(const at::Tensor& x, const at::Tensor& weight);
// Returns the dtype in which a device computes products of `dtype`: cpu_product_dtype() on a CPU.
at::ScalarType product_dtype(at::Device device, at::ScalarType dtype);

}  // namespace kiln::ops
