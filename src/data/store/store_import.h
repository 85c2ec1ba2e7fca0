// Feature caches of other trainers -> a feature store. Torch-free.
#pragma once
#include <cstdint>
#include <string>

namespace kiln {

struct StoreImportOptions {
  // fast-dit: files N.npy (1, C, h, w) of latents that are already scaled, with labels in a folder beside.
  // pixart: files *.npy (2C, h, w) of the posterior's mean and standard deviation, unscaled; each shape
  // becomes a lane.
  std::string from = "fast-dit";
  // Folder of *.npy. For fast-dit it may also be the folder above, with *_features and *_labels.
  std::string features;
  std::string labels;     // fast-dit: folder of N.npy (1); "": no labels
  std::string data_info;  // pixart: data_info.json with path, height, width and prompt; "": none
  std::string out;
  int64_t image_size = 0;
  double scaling_factor = 0;  // of the autoencoder; 0: fast-dit 0.18215, pixart: must be given
  int64_t num_classes = 0;    // 0: the largest label + 1
  std::string dtype = "f32";  // to store latents in: f32 | bf16 | fp16
};

// Imports a cache, or continues where an interrupted import stopped. Throws Error naming an unreadable or
// unfit array, a label without features, or features without a label.
void import_store(const StoreImportOptions& options);

}  // namespace kiln
