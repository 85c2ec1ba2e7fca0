#include "models/autoencoders/tiling.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "core/allocations.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "core/units.h"

namespace kiln {
namespace {

constexpr int64_t kHeight = 2, kWidth = 3;  // dimensions of (B, C, H, W)

using Half = std::function<at::Tensor(const at::Tensor&)>;

// Tiles of the input and of the output of encode or decode, each in its own pixels.
struct Grid {
  int64_t side = 0, stride = 0;          // of the input
  int64_t out_side = 0, out_stride = 0;  // of the output
};

// Blends the end of `before` linearly into the beginning of `tile`, in place.
void blend(const at::Tensor& before, const at::Tensor& tile, int64_t dimension, int64_t overlap) {
  const int64_t extent = std::min({before.size(dimension), tile.size(dimension), overlap});
  if (extent == 0) return;
  std::vector<int64_t> shape(4, 1);
  shape[dimension] = extent;
  const at::Tensor share = (at::arange(extent, tile.options()) / static_cast<double>(extent)).view(shape);
  const at::Tensor end = before.narrow(dimension, before.size(dimension) - extent, extent),
                   begin = tile.narrow(dimension, 0, extent);
  begin.copy_(end * (1 - share) + begin * share);
}

at::Tensor in_tiles(const at::Tensor& x, const Grid& grid, const Half& half) {
  const int64_t height = x.size(kHeight), width = x.size(kWidth), overlap = grid.out_side - grid.out_stride;
  std::vector<at::Tensor> rows, above;  // above: the last lines of the row of tiles above
  for (int64_t top = 0; top < height; top += grid.stride) {
    std::vector<at::Tensor> row, ends;
    at::Tensor left;
    for (int64_t first = 0, column = 0; first < width; first += grid.stride, ++column) {
      const at::Tensor part = x.narrow(kHeight, top, std::min(grid.side, height - top))
                                  .narrow(kWidth, first, std::min(grid.side, width - first));
      const at::Tensor tile = half(part.contiguous());
      if (!above.empty()) blend(above[column], tile, kHeight, overlap);
      if (left.defined()) blend(left, tile, kWidth, overlap);
      const int64_t kept_height = std::min(overlap, tile.size(kHeight));
      ends.push_back(tile.narrow(kHeight, tile.size(kHeight) - kept_height, kept_height).clone());
      row.push_back(tile.narrow(kHeight, 0, std::min(grid.out_stride, tile.size(kHeight)))
                        .narrow(kWidth, 0, std::min(grid.out_stride, tile.size(kWidth)))
                        .clone());
      left = tile;
    }
    rows.push_back(at::cat(row, kWidth));
    above = std::move(ends);
  }
  return at::cat(rows, kHeight);
}

class TiledAutoencoder : public Autoencoder {
 public:
  TiledAutoencoder(std::unique_ptr<Autoencoder> whole, std::unique_ptr<Autoencoder> on_meta,
                   const Tiling& tiling, at::Device device)
      : Autoencoder(*whole),
        whole_(std::move(whole)),
        on_meta_(std::move(on_meta)),
        tiling_(tiling),
        tiles_(tiles_of(*whole_, tiling.side > 0 ? tiling.side : Tiling::kUsualTile)),
        device_(device) {}

  at::Tensor encode(const at::Tensor& images) const override {
    return run(images, /*scale=*/1, &Autoencoder::encode, encode_tiled);
  }
  at::Tensor decode(const at::Tensor& raw_latents) const override {
    return run(raw_latents, downsample, &Autoencoder::decode, decode_tiled);
  }
  const ParameterList& parameters() const override { return whole_->parameters(); }
  void freeze_weights() override { whole_->freeze_weights(); }

 private:
  using Whole = at::Tensor (Autoencoder::*)(const at::Tensor&) const;
  using Tiled = at::Tensor (*)(const Autoencoder&, const at::Tensor&, const Tiles&);

  // `scale`: picture pixels along a side of one pixel of x.
  at::Tensor run(const at::Tensor& x, int64_t scale, Whole whole, Tiled tiled) const {
    const bool is_larger = x.dim() == 4 && std::max(x.size(kHeight), x.size(kWidth)) * scale > tiles_.side;
    if (!is_larger) return (*whole_.*whole)(x);
    if (tiling_.when == Tiling::When::kLargerThanTile) return tiled(*whole_, x, tiles_);
    const int64_t most = batch_with_room(x, whole);
    const Half at_once = [&](const at::Tensor& part) {
      return most > 0 ? (*whole_.*whole)(part) : tiled(*whole_, part, tiles_);
    };
    if (most >= x.size(0)) return at_once(x);
    if (most == 0) say_tiling(x, scale, peak_bytes(x, 1, whole));
    std::vector<at::Tensor> parts;
    for (const at::Tensor& part : x.split(std::max<int64_t>(most, 1))) parts.push_back(at_once(part));
    return at::cat(parts);
  }

  // Returns how many samples of x fit at once. 0: not even one.
  int64_t batch_with_room(const at::Tensor& x, Whole whole) const {
    int64_t batch = x.size(0);
    while (batch > 0 && peak_bytes(x, batch, whole) > tiling_.room_bytes) batch /= 2;
    return batch;
  }

  int64_t peak_bytes(const at::Tensor& x, int64_t batch, Whole whole) const {
    const auto key = std::tuple(whole == &Autoencoder::encode, batch, x.size(kHeight), x.size(kWidth));
    const auto known = peaks_.find(key);
    if (known != peaks_.end()) return known->second;
    const at::NoGradGuard no_grad;
    const DryRunScope dry_run(dry_run_of(device_));
    MetaMeter meter;
    const MetaAllocationScope metering(meter);
    (*on_meta_.*
     whole)(at::empty({batch, x.size(1), x.size(kHeight), x.size(kWidth)}, x.options().device(at::kMeta)));
    return peaks_[key] = meter.peak;
  }

  void say_tiling(const at::Tensor& x, int64_t scale, int64_t needed) const {
    if (said_) return;
    said_ = true;
    fmt::print(
        stderr,
        "note: the autoencoder takes {:.2f} GiB for a picture of {} x {}, {:.2f} GiB are free: it works in "
        "tiles of {} pixels\n",
        gib(needed), x.size(kHeight) * scale, x.size(kWidth) * scale, gib(tiling_.room_bytes), tiles_.side);
  }

  const std::unique_ptr<Autoencoder> whole_, on_meta_;
  const Tiling tiling_;
  const Tiles tiles_;
  const at::Device device_;
  mutable std::map<std::tuple<bool, int64_t, int64_t, int64_t>, int64_t> peaks_;
  mutable bool said_ = false;
};

}  // namespace

Tiling Tiling::parse(const char* option, const std::string& text, int64_t room_bytes) {
  if (text == "off") return {};
  if (text == "auto")
    return {.when = room_bytes > 0 ? When::kNoRoom : When::kNever, .room_bytes = room_bytes};
  const std::optional<int64_t> side = whole_number(text);
  if (!side || *side < 1)
    fail("autoencoder", "--{} expects auto, off or the side of a tile in pixels, got '{}'", option, text);
  return {.when = When::kLargerThanTile, .side = *side};
}

Tiles tiles_of(const Autoencoder& autoencoder, int64_t side) {
  const int64_t latent = autoencoder.downsample;
  if (side < 2 * latent || side % latent != 0)
    fail("autoencoder", "expected the side of a tile to be a multiple of {} pixels and at least {}, got {}",
         latent, 2 * latent, side);
  const double overlap = static_cast<double>(side) * autoencoder.tile_overlap;
  return {.side = side,
          .stride = side - latent * static_cast<int64_t>(std::ceil(overlap / static_cast<double>(latent)))};
}

at::Tensor encode_tiled(const Autoencoder& autoencoder, const at::Tensor& images, const Tiles& tiles) {
  const int64_t factor = autoencoder.downsample;
  const at::Tensor whole_latents = images.narrow(kHeight, 0, images.size(kHeight) / factor * factor)
                                       .narrow(kWidth, 0, images.size(kWidth) / factor * factor);
  return in_tiles(whole_latents,
                  {.side = tiles.side,
                   .stride = tiles.stride,
                   .out_side = tiles.side / factor,
                   .out_stride = tiles.stride / factor},
                  [&](const at::Tensor& tile) { return autoencoder.encode(tile); });
}

at::Tensor decode_tiled(const Autoencoder& autoencoder, const at::Tensor& raw_latents, const Tiles& tiles) {
  const int64_t factor = autoencoder.downsample;
  return in_tiles(raw_latents,
                  {.side = tiles.side / factor,
                   .stride = tiles.stride / factor,
                   .out_side = tiles.side,
                   .out_stride = tiles.stride},
                  [&](const at::Tensor& tile) { return autoencoder.decode(tile); });
}

std::unique_ptr<Autoencoder> with_tiling(std::unique_ptr<Autoencoder> whole,
                                         std::unique_ptr<Autoencoder> on_meta, const Tiling& tiling,
                                         at::Device device) {
  if (tiling.when == Tiling::When::kNever) return whole;
  return std::make_unique<TiledAutoencoder>(std::move(whole), std::move(on_meta), tiling, device);
}

}  // namespace kiln
