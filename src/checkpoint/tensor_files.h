// Weight files as at::Tensor maps.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "checkpoint/safetensors.h"

namespace kiln {

// Reads .safetensors, *.index.json or .pt/.pth, chosen by content. The CPU tensors keep the mapped file
// alive.
std::map<std::string, at::Tensor> load_tensors(const std::string& path, bool prefer_ema = true);
// Writes a safetensors file, with contiguous copies of tensors where needed. Atomic (see write_safetensors).
void save_tensors(const std::string& path, const std::map<std::string, at::Tensor>& tensors,
                  const std::map<std::string, std::string>& metadata = {});

}  // namespace kiln
