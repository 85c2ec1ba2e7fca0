// Host memory that a GPU copies from and to directly, of exactly the requested size. ATen's allocator rounds
// up to powers of two, which can double the memory of a large model's state.
#pragma once
#include <c10/core/Allocator.h>

#include <cstddef>

namespace kiln {

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
