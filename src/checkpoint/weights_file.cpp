#include "checkpoint/weights_file.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/files/xxh3.h"

namespace kiln {
namespace {

// What diffusers and transformers name the weights of a folder, in their order of preference.
constexpr const char* kWeightsOfFolder[] = {"diffusion_pytorch_model.safetensors",
                                            "diffusion_pytorch_model.safetensors.index.json",
                                            "model.safetensors",
                                            "model.safetensors.index.json",
                                            "diffusion_pytorch_model.bin",
                                            "pytorch_model.bin"};

std::string weights_of_folder(const std::string& folder) {
  for (const char* name : kWeightsOfFolder)
    if (const auto path = std::filesystem::path(folder) / name; std::filesystem::exists(path))
      return path.string();
  fail("weights",
       "no weights in the folder {}: expected diffusion_pytorch_model.safetensors or model.safetensors",
       folder);
}

}  // namespace

TensorFileFormat tensor_file_format(const std::string& path) {
  const RandomAccessFile file("weights", path);
  char start[16] = {};
  const std::string_view head(start, static_cast<std::size_t>(std::min<int64_t>(sizeof start, file.size())));
  file.read(0, std::as_writable_bytes(std::span(start, head.size())));
  if (head.starts_with("PK\x03\x04") || head.starts_with("PK\x05\x06")) return TensorFileFormat::kPt;
  // A safetensors header begins after its 8-byte length; the length's top bytes are zero.
  if (head.size() > 8 && head[8] == '{' && head[7] == 0 && head[6] == 0)
    return TensorFileFormat::kSafetensors;
  if (const auto first = head.find_first_not_of(" \t\r\n"); first != head.npos && head[first] == '{')
    return TensorFileFormat::kSafetensorsIndex;
  if (head.starts_with("\x80")) return TensorFileFormat::kPt;  // a bare pickle: open_pt says what to do
  return path.ends_with(".pt") || path.ends_with(".pth") ? TensorFileFormat::kPt
                                                         : TensorFileFormat::kSafetensors;
}

std::unique_ptr<TensorFile> open_tensor_file(const std::string& path, bool prefer_ema) {
  if (std::filesystem::is_directory(path)) return open_tensor_file(weights_of_folder(path), prefer_ema);
  switch (tensor_file_format(path)) {
    case TensorFileFormat::kPt:
      return open_pt(path, prefer_ema);
    case TensorFileFormat::kSafetensorsIndex:
      return open_safetensors_index(path);
    case TensorFileFormat::kSafetensors:
      return open_safetensors(path);
  }
  throw std::logic_error("open_tensor_file: not a TensorFileFormat");
}

std::string digest_of_weights(const std::string& path) {
  const std::unique_ptr<TensorFile> file = open_tensor_file(path);
  std::string text;
  for (const auto& [name, tensor] : file->tensors())
    text += fmt::format("{} {} {} {}\n", name, dtype_name(tensor.dtype), fmt::join(tensor.shape, ","),
                        xxh3_hex(tensor.bytes));
  return xxh3_hex(std::as_bytes(std::span(text)));
}

}  // namespace kiln
