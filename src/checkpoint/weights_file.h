// Opens any weights file by its content. Torch-free.
#pragma once
#include <memory>
#include <string>

#include "checkpoint/safetensors.h"

namespace kiln {

enum class TensorFileFormat { kSafetensors, kSafetensorsIndex, kPt };

// Returns the format, by the first bytes and not by the name. Throws Error when the file cannot be read.
TensorFileFormat tensor_file_format(const std::string& path);

// Opens a .safetensors, *.index.json or .pt/.pth/.bin file, or a folder that holds one under the names of
// diffusers or transformers.
std::unique_ptr<TensorFile> open_tensor_file(const std::string& path, bool prefer_ema = true);

// Returns a digest of the tensors that open_tensor_file() gives: names, types, shapes and values. Reads all
// of them.
std::string digest_of_weights(const std::string& path);

}  // namespace kiln
