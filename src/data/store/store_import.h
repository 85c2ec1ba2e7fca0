// Feature caches of other trainers -> a feature store. Torch-free.
#pragma once
#include <cstdint>
#include <string>

namespace kiln {

struct StoreImportOptions {
  // fast-dit: N.npy (1, C, h, w), latents that hold the scaling factor already, labels in a folder beside.
  // pixart: *.npy (2C, h, w), mean and standard deviation of the posterior, unscaled; several shapes become
  // lanes.
  std::string from = "fast-dit";
  // Folder of *.npy. For fast-dit also the folder above, with *_features and *_labels.
  std::string features;
  std::string labels;     // fast-dit: folder of N.npy (1); "": no labels
  std::string data_info;  // pixart: data_info.json with path, height, width and prompt; "": none
  std::string out;
  int64_t image_size = 0;
  double scaling_factor = 0;  // of the autoencoder; 0: fast-dit 0.18215, pixart: must be given
  int64_t num_classes = 0;    // 0: the largest label + 1
  std::string dtype = "f32";  // to store latents in: f32 | bf16 | fp16
};

// Continues where an interrupted import stopped. Throws Error: unreadable or odd arrays, labels without
// features, features without labels, all by name.
void import_store(const StoreImportOptions& options);

}  // namespace kiln
