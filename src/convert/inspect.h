// `kiln inspect`: what a model or a weights file holds.
#pragma once
#include <cstdio>
#include <string>

namespace kiln {

struct InspectOptions {
  std::string path;    // a weights file, a diffusers folder, a run or a checkpoint
  std::string model;   // or a name: of the registry, autoencoder_kl, or of a published file (sd-vae)
  std::string config;  // JSON text or file that overrides the model's preset
  bool ema = true;     // take the average of a file that holds both
};

// Prints one line per tensor to `out`: key, tab, shape with commas; for a file also tab, dtype. Prints
// format, architecture, counts and bytes to `summary`. Throws Error.
void inspect(const InspectOptions& options, std::FILE* out, std::FILE* summary);

}  // namespace kiln
