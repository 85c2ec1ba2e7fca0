// Reads .npz archives: arrays by name, and pictures one after another without the whole archive in memory.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "data/images/npz.h"

namespace kiln {

// An archive of numpy.savez or savez_compressed. Throws Error naming a file that is none.
class NpzArchive {
 public:
  explicit NpzArchive(const std::string& path);
  ~NpzArchive();
  NpzArchive(const NpzArchive&) = delete;

  bool has(const std::string& name) const;  // "mu" of mu.npy
  NpyHeader header(const std::string& name) const;
  // Reads a whole floating-point array as f64. Throws Error: missing, another type.
  at::Tensor read(const std::string& name) const;
  // Reads rows [first, first + count) of the first dimension, as bytes. Cheap if they follow those of the
  // last call. Throws Error: missing, damaged.
  std::vector<std::byte> rows(const std::string& name, int64_t first, int64_t count);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Writes f64 arrays as numpy.savez does, atomically. Throws Error.
void write_npz(const std::string& path, const std::map<std::string, at::Tensor>& arrays);

}  // namespace kiln
