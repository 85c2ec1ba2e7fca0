// Reads the samples or the reference pictures from a folder or an .npz, in a fixed order.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace kiln {

class PictureSource {
 public:
  // Opens a data set of any layout (docs/datasets.md), a folder of pictures (without the grid.png of kiln
  // sample) or an .npz whose arr_0 is u8 (N, H, W, 3). `crop`: side of DiT's centre crop in pixels, 0 for
  // none. `skips_broken`: pictures that are not there or cannot be decoded are named on stderr and left out.
  // Throws Error.
  static std::unique_ptr<PictureSource> open(const std::string& path, int64_t crop,
                                             bool skips_broken = false);
  virtual ~PictureSource() = default;

  virtual int64_t size() const = 0;  // with those that are skipped
  // Passes pictures [first, last) to `sink` in batches (B, 3, H, W) u8 of at most `batch`, each of one size.
  // Throws Error naming a picture that cannot be read, unless such pictures are skipped.
  using Sink = std::function<void(int64_t first, const at::Tensor& pictures)>;
  virtual void for_each_batch(int64_t first, int64_t last, int64_t batch, const Sink& sink) = 0;
};

}  // namespace kiln
