// The options of `kiln extract`.
#pragma once
#include <cstdint>
#include <string>

#include "extract/text_extract.h"

namespace kiln {

struct ExtractOptions {
  std::string data, autoencoder, out;
  int64_t image_size = 0;
  // "": all pictures are brought to image_size x image_size. Else a table of sizes, each picture goes to the
  // nearest: pixart (the published one of image_size) or HxW,HxW,...; then image_size is what the store is
  // called, 0 = the side of the square with the buckets' area.
  std::string buckets;
  int64_t bucket_min = 1;                  // buckets of fewer pictures join others; 1 = none does
  std::string exif_orientation = "apply";  // apply | ignore, as DiT and PixArt do
  std::string flip = "none";               // none | both: each picture as it is and mirrored
  bool enlarge = false;  // pictures smaller than image_size or their bucket, as DiT and PixArt do; else they
                         // are left out
  bool append = false;   // the store at `out` gets the pictures that it lacks, as a further part
  bool strict = false;   // stop at a broken or too small picture instead of leaving it out
  int64_t batch = 0;     // pictures encoded at once; 0 = by device
  std::string dtype = "f32";          // of the stored latents
  std::string compute_dtype = "f32";  // of the autoencoder
  std::string tiles = "auto";         // large pictures are cut: auto | off | side in pixels
  bool tf32 = false;                  // CUDA: f32 products in TF32
  std::string device = "auto";
  int64_t shard_size = 4096;  // samples per file
  int64_t workers = 0;        // decoding threads; 0 = by device
  int64_t nproc = 0;          // ranks that this process starts on this machine; 0 = none
  TextExtractOptions text{};  // what to do with captions, when the pictures are in the store
};

}  // namespace kiln
