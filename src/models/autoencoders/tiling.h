// Pictures that are too large for an autoencoder at once are cut into tiles that overlap, and the tiles'
// results blended where they do, as diffusers' enable_tiling() does it. What lies far apart in the picture is
// then not seen together (attention, group norms): a tiled result differs from the whole one
// (docs/text_to_image.md).
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "models/autoencoders/autoencoder.h"

namespace kiln {

// Both lengths are in pixels and multiples of the autoencoder's `downsample`.
struct Tiles {
  int64_t side = 0;    // of a tile
  int64_t stride = 0;  // from one tile to the next; neighbours share side - stride pixels
};

// When pictures are cut.
struct Tiling {
  enum class When { kNever, kLargerThanTile, kNoRoom };
  When when = When::kNever;
  int64_t side = 0;  // of a tile in pixels; 0: kUsualTile
  // With kNoRoom a call may take so many bytes. A batch that needs more is halved before pictures are cut.
  int64_t room_bytes = 0;

  static constexpr int64_t kUsualTile = 512;
  // Reads "auto" (pictures are cut where `room_bytes` have no room for the whole), "off" or a side in pixels.
  // Throws Error naming --`option`.
  static Tiling parse(const char* option, const std::string& text, int64_t room_bytes);
};

// The tiles of this side with the overlap that diffusers gives the autoencoder, rounded up to whole latents.
// Throws Error for a side that is no multiple of a latent's pixels, or less than two of them.
Tiles tiles_of(const Autoencoder& autoencoder, int64_t side);

// These do what Autoencoder::encode() and decode() do, tile by tile, with one row of tiles in memory. Sides
// that `downsample` does not divide are rounded down.
at::Tensor encode_tiled(const Autoencoder& autoencoder, const at::Tensor& images, const Tiles& tiles);
at::Tensor decode_tiled(const Autoencoder& autoencoder, const at::Tensor& raw_latents, const Tiles& tiles);

// Loads as load_autoencoder() does an autoencoder that cuts pictures as `tiling` says. Throws Error.
std::unique_ptr<Autoencoder> load_autoencoder(const std::string& path, at::Device device,
                                              at::ScalarType compute_dtype, const Tiling& tiling);
// Returns an autoencoder that cuts what is given to `whole` as `tiling` says. `on_meta`: the same autoencoder
// on meta, which kNoRoom needs; it may be null otherwise. `device`: of `whole`.
std::unique_ptr<Autoencoder> with_tiling(std::unique_ptr<Autoencoder> whole,
                                         std::unique_ptr<Autoencoder> on_meta, const Tiling& tiling,
                                         at::Device device);

}  // namespace kiln
