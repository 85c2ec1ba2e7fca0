#include "parallel/offload/host_memory.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/aten.h"
#include "core/tensors.h"
#include "parallel/offload/pinned_memory.h"

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

}  // namespace kiln
