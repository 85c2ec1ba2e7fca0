// .npy and .npz. Torch-free.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "data/images.h"

namespace kiln {

struct NpyArray {
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;  // C order
};
NpyArray read_npy(const std::string& path);  // throws Error (fortran order, objects, truncation)

// ADM's evaluation format: arr_0 uint8 (N, H, W, 3), stored, written as images come: needs no memory for them.
// Reopening a partial file continues behind the last complete image. The final name appears when all are written.
class NpzImageWriter {
 public:
  static std::unique_ptr<NpzImageWriter> open(const std::string& path, int64_t num_images, int64_t height, int64_t width);
  virtual ~NpzImageWriter() = default;
  virtual int64_t num_written() const = 0;
  virtual void add(const Image& image) = 0;
  virtual void finish() = 0;
};

}  // namespace kiln
