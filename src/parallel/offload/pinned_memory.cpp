#include "parallel/offload/pinned_memory.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <exception>
#include <memory>
#include <type_traits>

#include "core/error.h"

namespace kiln {

namespace {

struct PinnedPages {
  PagePinning pinning;
  void* address = MAP_FAILED;
  size_t bytes = 0;
  bool is_pinned = false;

  // After an error the device may be waiting for a rank that is gone, and waiting for its copies would hang
  // too. The pages are then left to the end of the process.
  ~PinnedPages() {
    if (is_pinned && std::uncaught_exceptions() > 0) return;
    if (is_pinned) {
      pinning.finish_copies();
      pinning.unpin(address);
    }
    if (address != MAP_FAILED) ::munmap(address, bytes);
  }
};

}  // namespace

PagePinning cuda_pinning() {
  PagePinning pinning;
  const auto find = [](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(RTLD_DEFAULT, name));
  };
  find(pinning.pin, "cudaHostRegister");
  find(pinning.finish_copies, "cudaDeviceSynchronize");
  find(pinning.unpin, "cudaHostUnregister");
  return pinning;
}

at::DataPtr pinned_zeros(size_t bytes, const PagePinning& pinning) {
  constexpr unsigned kPortable = 1;  // cudaHostRegisterPortable: for every context
  if (bytes == 0) return {nullptr, at::kCPU};
  if (!pinning.pin || !pinning.finish_copies || !pinning.unpin)
    fail("offload", "there is no CUDA runtime to pin host memory with");
  auto pages = std::make_unique<PinnedPages>(PinnedPages{.pinning = pinning, .bytes = bytes});
  const double gib = static_cast<double>(bytes) / (1 << 30);
  pages->address =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, /*offset=*/0);
  if (pages->address == MAP_FAILED)
    fail("offload", "the host has no {:.2f} GiB of memory for what is offloaded", gib);
  const int error = pinning.pin(pages->address, bytes, kPortable);
  if (error != 0)
    fail("offload", "CUDA could not pin {:.2f} GiB of host memory (error {}): free memory, or offload less",
         gib, error);
  pages->is_pinned = true;
  void* const address = pages->address;
  return {address, pages.release(), [](void* context) { delete static_cast<PinnedPages*>(context); },
          at::kCPU};
}

}  // namespace kiln
