// PyTorch .pt/.pth files (zip of a pickle and raw storages), without torch and without executing anything.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"

namespace kiln {

// A plain state dict; {"model", "ema", ...} (DiT: `ema` is taken when prefer_ema and present, else `model`);
// {"state_dict", "state_dict_ema"} (PixArt, Sana). Unknown classes (argparse.Namespace) are skipped as opaque
// values; anything that would have to be executed is refused by name. Throws Error.
std::unique_ptr<TensorFile> open_pt(const std::string& path, bool prefer_ema = true);

// Writes what torch.load(weights_only=True) reads. `groups`: one unnamed group = a plain state dict; several named
// ones = {"model": {...}, "ema": {...}}.
struct PtGroup {
  std::string name;
  std::vector<NamedTensor> tensors;
};
void write_pt(const std::string& path, const std::vector<PtGroup>& groups);

}  // namespace kiln
