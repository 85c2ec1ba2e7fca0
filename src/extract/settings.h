// The options of `kiln extract`, and what they come to on this machine and in the store.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "data/images/image_dataset.h"
#include "data/store/feature_store.h"
#include "data/text_store/caption_table.h"
#include "data/text_store/text_store_info.h"
#include "extract/picture_lanes.h"
#include "models/autoencoders/autoencoder.h"
#include "models/text/caption_encoder.h"
#include "models/text/caption_options.h"

namespace kiln {

// Returns the captions of picture `index` with prefix and suffix, without empty ones and repetitions. Throws
// Error naming the picture if one is no UTF-8.
std::vector<Caption> captions_of(const ImageDataset& dataset, int64_t index, const CaptionOptions& options);
// Throws Error for an unknown source.
void check_caption_options(const CaptionOptions& options);

// Returns "red apple" for "animals/red_apple-2.png": the base name without its extension and a number at its
// end, with spaces for separators.
std::string caption_of_file_name(const std::string& name);

// Returns the room that --text-encoder-memory leaves on the device, or `otherwise` without this option.
// Throws Error if it leaves none.
EncoderRoom encoder_room(const CaptionEncodingOptions& options, at::Device device, EncoderRoom otherwise);

// Returns the info of a text store of such captions, without the fields about its samples. `compute_dtype` is
// the encoder's.
TextStoreInfo describe_text(const CaptionEncoder& encoder, const CaptionEncodingOptions& options,
                            const std::string& compute_dtype);

// Throws Error if no sample of the table has a caption. `data` names its pictures in the message.
void require_captions(const CaptionTable& table, const std::string& data);

struct ExtractOptions {
  std::string data, autoencoder, out;
  int64_t image_size = 0;
  // "": all pictures are brought to image_size x image_size. Else a table of sizes, and each picture goes to
  // the nearest: pixart (the published table of image_size) or HxW,HxW,... With a table image_size only names
  // the store; 0 = the side of the square with the buckets' area.
  std::string buckets;
  int64_t bucket_min = 1;                  // buckets of fewer pictures join others; 1 = none does
  std::string exif_orientation = "apply";  // apply | ignore, as DiT and PixArt do
  std::string flip = "none";               // none | both: each picture as it is and mirrored
  // Enlarge pictures smaller than image_size or their bucket, as DiT and PixArt do. Else they are left out.
  bool enlarge = false;
  bool append = false;                // add the pictures that the store at `out` lacks, as a further part
  bool strict = false;                // stop at a broken or too small picture instead of leaving it out
  int64_t batch = 0;                  // pictures encoded at once; 0 = by device
  std::string dtype = "f32";          // of the stored latents
  std::string compute_dtype = "f32";  // of the autoencoder
  std::string tiles = "auto";         // cut large pictures: auto | off | side in pixels
  bool tf32 = false;                  // CUDA: f32 products in TF32
  std::string device = "auto";
  int64_t shard_size = 4096;      // samples per file
  int64_t workers = 0;            // decoding threads; 0 = by device
  int64_t threads = 0;            // compute threads; 0 = all cores, divided among the ranks of a machine
  int64_t nproc = 0;              // ranks that this process starts on this machine; 0 = none
  CaptionEncodingOptions text{};  // how to encode captions, after the pictures
};

struct ExtractSettings {
  at::Device device = at::kCPU;
  at::ScalarType compute_dtype = at::kFloat;
  int64_t num_flips = 1;
  int64_t batch = 1;
  int num_workers = 1;  // decoding threads of this rank
};
// Returns what the options mean on this machine. `cpu_share` is the number of processors of this rank
// (parallel/cpu_share.h). Throws Error: impossible values.
ExtractSettings resolve(const ExtractOptions& options, int64_t local_rank, int64_t cpu_share);

PictureLaneOptions lane_options_of(const ExtractOptions& options, const ExtractSettings& settings);

// Returns everything that decides the bytes of the samples, and the autoencoder's path. A run that would
// continue with other settings is refused.
StoreInfo make_store_info(const ExtractOptions& options, const ExtractSettings& settings,
                          const ImageDataset& dataset, const Autoencoder& autoencoder,
                          const PictureLanes& lanes);

}  // namespace kiln
