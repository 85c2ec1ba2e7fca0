// kiln extract: pictures -> feature store, and their captions -> text store.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "extract/text_extract.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

struct ExtractOptions {
  std::string data, autoencoder, out;
  int64_t image_size = 0;
  std::string flip = "none";          // none | both: each picture as it is and mirrored
  bool enlarge = false;               // pictures smaller than image_size, as DiT does; else they are left out
  bool strict = false;                // stop at a broken or too small picture instead of leaving it out
  int64_t batch = 0;                  // pictures encoded at once; 0 = by device
  std::string dtype = "f32";          // of the stored latents
  std::string compute_dtype = "f32";  // of the autoencoder
  std::string device = "auto";
  int64_t shard_size = 4096;  // samples per file
  int64_t workers = 0;        // decoding threads; 0 = by device
  int64_t nproc = 0;          // ranks that this process starts on this machine; 0 = none
  TextExtractOptions text{};  // what to do with captions, when the pictures are in the store
};

// Without an autoencoder the store must be complete, and text is added to it.
//
// Continues what an earlier run of the same settings left in `out`: the store's bytes are those of an
// uninterrupted run. SIGINT and SIGTERM end it after the batch in hand. Several ranks take whole batches of
// the pictures in turn of place: the store is the one that a single rank makes, in other shards. Throws
// Error: nothing to read, impossible options, a store of other settings, a broken picture when strict.
void extract(const ExtractOptions& options, ProcessGroup& group);

}  // namespace kiln
