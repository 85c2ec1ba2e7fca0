#include "checkpoint/tensor_files.h"

#include <cstring>

#include "checkpoint/weights_file.h"
#include "core/aten.h"
#include "core/tensors.h"

namespace kiln {
namespace {

at::Tensor as_tensor(const TensorView& view, const std::shared_ptr<TensorFile>& owner) {
  const auto options = at::TensorOptions().dtype(to_scalar_type(view.dtype));
  // The mapping is private and writable, so the const may be cast away.
  auto* data = const_cast<std::byte*>(view.bytes.data());
  if (reinterpret_cast<std::uintptr_t>(data) % dtype_size(view.dtype) != 0) {
    at::Tensor copy = at::empty(view.shape, options);
    std::memcpy(copy.data_ptr(), data, view.bytes.size());
    return copy;
  }
  return at::from_blob(
      data, view.shape, [owner](void*) {}, options);
}

}  // namespace

std::map<std::string, at::Tensor> load_tensors(const std::string& path, bool prefer_ema) {
  const std::shared_ptr<TensorFile> file = open_tensor_file(path, prefer_ema);
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, view] : file->tensors()) tensors.emplace(name, as_tensor(view, file));
  return tensors;
}

void save_tensors(const std::string& path, const std::map<std::string, at::Tensor>& tensors,
                  const std::map<std::string, std::string>& metadata) {
  std::vector<NamedTensor> views;
  std::vector<at::Tensor> kept;  // what the views point into
  for (const auto& [name, tensor] : tensors) {
    kept.push_back(tensor.detach().to(at::kCPU).contiguous());
    const at::Tensor& held = kept.back();
    views.push_back(
        {name,
         {from_scalar_type(held.scalar_type()),
          held.sizes().vec(),
          {static_cast<const std::byte*>(held.const_data_ptr()), static_cast<std::size_t>(held.nbytes())}}});
  }
  write_safetensors(path, views, metadata);
}

}  // namespace kiln
