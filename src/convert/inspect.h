// `kiln inspect`: what a model or a weights file holds.
#pragma once
#include <cstdio>
#include <string>

namespace kiln {

struct InspectOptions {
  std::string path;    // a weights file, a diffusers folder, a run or a checkpoint
  std::string model;   // or a name: of the registry, autoencoder_kl, or of a published file (sd-vae)
  std::string config;  // JSON text or file that overrides the model's preset
  bool ema = true;     // of a file that holds both
};

// To `out`, one line per tensor: key, tab, shape with commas; for a file also tab, dtype. To `summary`:
// format, architecture, counts, bytes. Throws Error.
void inspect(const InspectOptions& options, std::FILE* out, std::FILE* summary);

}  // namespace kiln
