// Opens any weights file by its content, and PyTorch's .pt and .pth files (zip of a pickle and raw storages)
// without torch and without executing anything. Torch-free.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

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

// Reads a plain state dict; {"model", "ema", ...} (DiT: `ema` is taken when prefer_ema and present, else
// `model`); {"state_dict", "state_dict_ema"} (PixArt, Sana). Unknown classes (argparse.Namespace) are skipped
// as opaque values; anything that would have to be executed is refused by name. A "module." or "_orig_mod."
// before every key is dropped. metadata(): "pt_group" = where the weights were found ("" = the top level).
// Throws Error.
std::unique_ptr<TensorFile> open_pt(const std::string& path, bool prefer_ema = true);
// For fuzzing: the same on bytes in memory, which must outlive the result.
std::unique_ptr<TensorFile> parse_pt(std::span<const std::byte> bytes, const std::string& name,
                                     bool prefer_ema = true);

// Writes what torch.load(weights_only=True) reads. `groups`: one unnamed group = a plain state dict; several
// named ones = {"model": {...}, "ema": {...}}. Atomic; the same input gives the same bytes. Throws Error.
struct PtGroup {
  std::string name;
  std::vector<NamedTensor> tensors;
};
void write_pt(const std::string& path, const std::vector<PtGroup>& groups);

}  // namespace kiln
