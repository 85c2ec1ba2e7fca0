// Cuts pictures that are too large for an autoencoder into overlapping tiles and blends the results where
// tiles overlap, as diffusers' enable_tiling() does. Attention and group norms then see one tile at a time,
// so a tiled result differs from that of the whole picture (docs/large_pictures.md).
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "models/autoencoders/autoencoder.h"

namespace kiln {

// Both lengths are in pixels and multiples of the autoencoder's `downsample`.
struct Tiles {
  int64_t side = 0;    // of a tile
  int64_t stride = 0;  // from one tile to the next; neighbours overlap by side - stride pixels
};

// Says when pictures are cut.
struct Tiling {
  enum class When { kNever, kLargerThanTile, kNoRoom };
  When when = When::kNever;
  int64_t side = 0;  // of a tile in pixels; 0: kUsualTile
  // Bytes that a call may take with kNoRoom. A batch that needs more is halved before pictures are cut.
  int64_t room_bytes = 0;

  static constexpr int64_t kUsualTile = 512;
  // Reads "auto" (cuts a picture if the whole does not fit `room_bytes`), "off" or a side in pixels. Throws
  // Error naming --`option`.
  static Tiling parse(const char* option, const std::string& text, int64_t room_bytes);
};

// Returns tiles of this side with diffusers' overlap for the autoencoder, rounded up to whole latents. Throws
// Error for a side that is no multiple of a latent's pixels or is less than two latents.
Tiles tiles_of(const Autoencoder& autoencoder, int64_t side);

// Do what Autoencoder::encode() and decode() do, tile by tile, with one row of tiles in memory. Sides that
// `downsample` does not divide are rounded down.
at::Tensor encode_tiled(const Autoencoder& autoencoder, const at::Tensor& images, const Tiles& tiles);
at::Tensor decode_tiled(const Autoencoder& autoencoder, const at::Tensor& raw_latents, const Tiles& tiles);

// Loads an autoencoder as load_autoencoder() does, and cuts pictures as `tiling` says. Throws Error.
std::unique_ptr<Autoencoder> load_autoencoder(const std::string& path, at::Device device,
                                              at::ScalarType compute_dtype, const Tiling& tiling);
// Returns an autoencoder that cuts pictures as `tiling` says and runs `whole` on the tiles. `on_meta`: the
// same autoencoder on meta for kNoRoom, else it may be null. `device`: the device of `whole`.
std::unique_ptr<Autoencoder> with_tiling(std::unique_ptr<Autoencoder> whole,
                                         std::unique_ptr<Autoencoder> on_meta, const Tiling& tiling,
                                         at::Device device);

}  // namespace kiln
