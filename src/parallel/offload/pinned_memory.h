// Host memory that a GPU copies from and to directly, of exactly the size that is asked for: ATen's allocator
// rounds up to powers of two, which for the state of a large model is as much as the state again.
#pragma once
#include <c10/core/Allocator.h>

#include <cstddef>

namespace kiln {

// How the pages of an address range are fixed, and let go again once no copy uses them: CUDA's
// cudaHostRegister(), cudaDeviceSynchronize() and cudaHostUnregister(), which return 0 for success.
struct PagePinning {
  int (*pin)(void* address, size_t bytes, unsigned flags) = nullptr;
  int (*finish_copies)() = nullptr;
  int (*unpin)(void* address) = nullptr;
};
PagePinning cuda_pinning();  // of the CUDA runtime in this process; null pointers where there is none

// Zeros, on pages of their own. Throws Error: the host has no such memory, or does not let so much be pinned.
at::DataPtr pinned_zeros(size_t bytes, const PagePinning& pinning);

}  // namespace kiln
