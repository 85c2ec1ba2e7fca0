#include "parallel/host_memory.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/dry_run.h"

namespace kiln {

namespace {

// On meta, in a storage that comes from no allocator.
at::Tensor unseen_meta(int64_t size, at::ScalarType dtype) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), size * static_cast<int64_t>(c10::elementSize(dtype)),
                       at::DataPtr(nullptr, at::kMeta), /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::Meta), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({size});
  return tensor;
}

}  // namespace

bool has_host_behind(at::Device device) {
  return device.is_cuda() || (device.is_meta() && dry_run_device() != DryRunDevice::kCpu);
}

at::Tensor host_zeros(int64_t size, at::ScalarType dtype, at::Device device) {
  if (device.is_meta())
    return has_host_behind(device) ? unseen_meta(size, dtype)
                                   : at::empty({size}, at::TensorOptions(at::kMeta).dtype(dtype));
  const auto options = at::TensorOptions(at::kCPU).dtype(dtype);
  if (device.is_cuda()) return at::empty({size}, options.pinned_memory(true)).zero_();
  return at::zeros({size}, options);
}

std::optional<c10::Event> record_event(at::Device device) {
  if (!device.is_cuda()) return std::nullopt;
  std::optional<c10::Event> event(device.type());
  event->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

}  // namespace kiln
