#include "parallel/offload/host_copy.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "core/aten.h"
#include "core/tensors.h"
#include "parallel/offload/host_memory.h"

namespace kiln {

at::Tensor host_empty(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  return at::empty(sizes, at::TensorOptions(at::kCPU).dtype(dtype).pinned_memory(device.is_cuda()));
}

at::Tensor sent_to(const at::Tensor& host, at::Device device) {
  return has_values(device) ? host.to(device, /*non_blocking=*/true)
                            : at::empty(host.sizes(), host.options().device(device));
}

HostRead::HostRead(const at::Tensor& values) {
  if (!has_values(values)) return;
  if (values.is_cpu()) {
    host_ = values;
    return;
  }
  host_ = host_empty(values.sizes(), values.scalar_type(), values.device());
  host_.copy_(values, /*non_blocking=*/true);
  end_ = record_event(values.device());
}

const at::Tensor& HostRead::wait() const {
  if (end_) end_->synchronize();
  return host_;
}

StagedRead::StagedRead(at::Device device, int64_t buffer_bytes)
    : device_(device), buffer_bytes_(buffer_bytes) {
  for (Buffer& buffer : buffers_) buffer.bytes = host_zeros(buffer_bytes, at::kByte, device);
}

at::Tensor StagedRead::read(const at::Tensor& tensor) {
  if (!tensor.is_contiguous()) throw std::logic_error("StagedRead: the tensor is not contiguous");
  at::Tensor host = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  const auto num_bytes = static_cast<int64_t>(tensor.nbytes());
  if (num_bytes == 0) return host;
  const at::Tensor from = tensor.detach().view({-1}).view(at::kByte);
  auto* to = static_cast<std::byte*>(host.mutable_data_ptr());
  const int64_t num_pieces = (num_bytes + buffer_bytes_ - 1) / buffer_bytes_;
  const auto size_of = [&](int64_t piece) {
    return std::min(buffer_bytes_, num_bytes - piece * buffer_bytes_);
  };
  for (int64_t piece = 0; piece <= num_pieces; ++piece) {
    if (piece < num_pieces) {
      Buffer& next = buffers_[static_cast<size_t>(piece % 2)];
      const int64_t size = size_of(piece);
      next.bytes.narrow(0, 0, size).copy_(from.narrow(0, piece * buffer_bytes_, size), /*non_blocking=*/true);
      next.filled = record_event(device_);
    }
    if (piece == 0) continue;
    const int64_t previous = piece - 1;
    const Buffer& buffer = buffers_[static_cast<size_t>(previous % 2)];
    if (buffer.filled) buffer.filled->synchronize();
    std::memcpy(to + previous * buffer_bytes_, buffer.bytes.const_data_ptr(),
                static_cast<size_t>(size_of(previous)));
  }
  return host;
}

}  // namespace kiln
