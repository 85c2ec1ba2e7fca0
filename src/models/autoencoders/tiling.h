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

// In pixels, multiples of the autoencoder's `downsample`.
struct Tiles {
  int64_t side = 0;    // of a tile
  int64_t stride = 0;  // from one tile to the next; the rest of it overlaps
};

// When pictures are cut.
struct Tiling {
  enum class When { kNever, kLargerThanTile, kNoRoom };
  When when = When::kNever;
  int64_t side = 0;  // of a tile in pixels; 0: kUsualTile
  int64_t room_bytes =
      0;  // kNoRoom: that a call may take; a batch for which there is no room is halved first

  static constexpr int64_t kUsualTile = 512;
  // "auto": where there is no room in `room_bytes` for the whole; "off"; or a side in pixels. Throws Error
  // naming --`option`.
  static Tiling parse(const char* option, const std::string& text, int64_t room_bytes);
};

// The tiles of this side with the overlap that diffusers gives the autoencoder. Throws Error for a side that
// is no multiple of four latents.
Tiles tiles_of(const Autoencoder& autoencoder, int64_t side);

// As Autoencoder::encode() and decode(), tile by tile; one row of tiles is in memory. Sides that `downsample`
// does not divide are rounded down.
at::Tensor encode_tiled(const Autoencoder& autoencoder, const at::Tensor& images, const Tiles& tiles);
at::Tensor decode_tiled(const Autoencoder& autoencoder, const at::Tensor& raw_latents, const Tiles& tiles);

// load_autoencoder() whose pictures are cut as `tiling` says.
std::unique_ptr<Autoencoder> load_autoencoder(const std::string& path, at::Device device,
                                              at::ScalarType compute_dtype, const Tiling& tiling);
// Cuts what is given to `whole` as `tiling` says. `on_meta`: the same autoencoder on meta, for kNoRoom; else
// it may be null. `device`: of `whole`.
std::unique_ptr<Autoencoder> with_tiling(std::unique_ptr<Autoencoder> whole,
                                         std::unique_ptr<Autoencoder> on_meta, const Tiling& tiling,
                                         at::Device device);

}  // namespace kiln
