#include "parallel/offload/host_memory.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <memory>
#include <type_traits>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"

namespace kiln {

namespace {

// Makes a tensor on memory that does not come from one of ATen's allocators.
at::Tensor tensor_on(at::DataPtr memory, int64_t size, at::ScalarType dtype) {
  const c10::DispatchKey key = c10::computeDispatchKey(dtype, at::kStrided, memory.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), size * static_cast<int64_t>(c10::elementSize(dtype)),
                       std::move(memory), /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                               c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({size});
  return tensor;
}

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

bool has_host_behind(at::Device device) { return computing_device(device) == at::kCUDA; }

at::Tensor host_zeros(int64_t size, at::ScalarType dtype, at::Device device) {
  if (!has_host_behind(device)) return at::zeros({size}, at::TensorOptions(device).dtype(dtype));
  if (!device.is_cuda()) return tensor_on({nullptr, device}, size, dtype);
  return tensor_on(pinned_zeros(static_cast<size_t>(size) * c10::elementSize(dtype), cuda_pinning()), size,
                   dtype);
}

at::Tensor host_copy_in_f32(const at::Tensor& host, at::Device device) {
  return device.is_cuda() ? host.to(at::kFloat) : host_zeros(host.numel(), at::kFloat, device);
}

std::optional<c10::Event> record_event(at::Device device) {
  if (!device.is_cuda()) return std::nullopt;
  std::optional<c10::Event> event(device.type());
  event->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

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
