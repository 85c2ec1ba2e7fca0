// Host memory behind a device: where offloaded tensors wait.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Event.h>

#include <cstddef>
#include <optional>

namespace kiln {

// True if `device` has a host behind it. False on a CPU, whose tensors are in host memory anyway. Meta
// tensors count as the device of the dry run.
bool has_host_behind(at::Device device);

// Returns a 1-D tensor of zeros in host memory, pinned if `device` is CUDA. In a dry run it is on meta, and
// the trace sees its memory only if the device is a CPU.
at::Tensor host_zeros(int64_t size, at::ScalarType dtype, at::Device device);

// Returns an f32 copy of what is in host memory behind `device`, in the host's ordinary memory.
at::Tensor host_copy_in_f32(const at::Tensor& host, at::Device device);

// Records an event after what was queued on the current stream of `device` so far. Returns nothing where
// copies are done when they return.
std::optional<c10::Event> record_event(at::Device device);

// Functions that pin the pages of an address range and unpin them once no copy uses them: CUDA's
// cudaHostRegister(), cudaDeviceSynchronize() and cudaHostUnregister(). They return 0 for success.
struct PagePinning {
  int (*pin)(void* address, size_t bytes, unsigned flags) = nullptr;
  int (*finish_copies)() = nullptr;
  int (*unpin)(void* address) = nullptr;
};
PagePinning cuda_pinning();  // of the CUDA runtime in this process; null pointers where there is none

// Returns zeros on pages of their own. Throws Error if the host lacks the memory or does not allow that much
// to be pinned.
at::DataPtr pinned_zeros(size_t bytes, const PagePinning& pinning);

}  // namespace kiln
