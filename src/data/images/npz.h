// .npy and .npz files. Torch-free.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "data/images/images.h"

namespace kiln {

struct NpyArray {
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;  // C order, little-endian
};
NpyArray read_npy(const std::string& path);  // throws Error (fortran order, objects, big-endian, truncation)
NpyArray parse_npy(std::span<const std::byte> bytes, const std::string& name);

// Reads all arrays of an archive of numpy.savez or savez_compressed, by name. Throws Error naming the archive
// and, if an array is damaged, that array.
std::map<std::string, NpyArray> read_npz(const std::string& path);

// The header of an array, for reading the data piece by piece.
struct NpyHeader {
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  size_t data_offset = 0;  // in bytes from the start of the array's file
  uint64_t data_bytes = 0;
};
// Returns the size of a header in bytes, from its first 12 bytes. Throws Error: no .npy array.
size_t npy_header_bytes(std::span<const std::byte> begin, const std::string& name);
// `begin` holds at least that many bytes. Throws Error as read_npy().
NpyHeader parse_npy_header(std::span<const std::byte> begin, const std::string& name);

// Writes ADM's evaluation format: arr_0 uint8 (N, H, W, 3), not compressed. Images are written as they come
// and not kept in memory. Reopening a partial file (`path`.partial) continues behind its last complete image.
// The file gets its final name when all images are written. The same images give the same bytes, interrupted
// or not.
class NpzImageWriter {
 public:
  // `settings` names everything that decides the pixels. The file keeps its hash (in a zip extra field, which
  // readers skip), so that it never mixes images of different settings. Throws Error: the file cannot be
  // written, or it exists with other images (count, size or settings).
  static std::unique_ptr<NpzImageWriter> open(const std::string& path, int64_t num_images, int64_t height,
                                              int64_t width, std::string_view settings);
  virtual ~NpzImageWriter() = default;
  virtual int64_t num_written() const = 0;
  virtual void add(const Image& image) = 0;  // throws Error: wrong size, one too many, disk full
  virtual void finish() = 0;                 // throws Error when images are missing
};

}  // namespace kiln
