// safetensors files, memory-mapped, without torch. Format: u64 header length, JSON header, data.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace kiln {

struct TensorView {
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // row-major, valid as long as the file object lives
};

// A set of named tensors read from files.
class TensorFile {
 public:
  virtual ~TensorFile() = default;
  const std::map<std::string, TensorView>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 protected:
  std::map<std::string, TensorView> tensors_;
  std::map<std::string, std::string> metadata_;
};

// Every bound is checked before use: header length, offsets, overlaps, holes, shape products. Throws Error.
std::unique_ptr<TensorFile> open_safetensors(const std::string& path);
// Opens the shards named by a `*.index.json`, safetensors or PyTorch's .bin. Throws Error naming the missing
// shard or key.
std::unique_ptr<TensorFile> open_safetensors_index(const std::string& path);
// For fuzzing: the same checks on bytes in memory, which must outlive the result.
std::unique_ptr<TensorFile> parse_safetensors(std::span<const std::byte> bytes, const std::string& name);

// A tensor of a file to be written.
struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
};
// Where each part of a safetensors file will be, in bytes from its start.
struct SafetensorsLayout {
  std::string head;               // the first bytes: length and header. The data follow
  std::vector<uint64_t> offsets;  // of each tensor, in the order given
  uint64_t file_bytes = 0;
};
// Lays the tensors out in the given order; data begins at a 64-byte boundary. Throws Error for a name given
// twice.
SafetensorsLayout lay_out_safetensors(const std::vector<TensorSpec>& tensors,
                                      const std::map<std::string, std::string>& metadata = {});

struct NamedTensor {
  std::string name;
  TensorView view;
};
// Writes an AtomicFile. Larger elements first (so that each tensor is aligned to its elements), otherwise in
// the given order, data from a 64-byte boundary on; the same input gives the same bytes. Throws Error (disk
// full, no permission), leaving an older file as it was and no partial one.
void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace kiln
