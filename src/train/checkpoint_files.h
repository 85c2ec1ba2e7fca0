// Which bytes of a checkpoint's files come from which part of the training state. Every tensor is whole in
// its file, weights f32 or as the master is kept; the ranks divide the bytes among them.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/file_checksum.h"
#include "checkpoint/safetensors.h"
#include "step/training_state.h"

namespace kiln {

// "exp_avg.blocks.0.attn.qkv.weight"
std::string moment_key(const std::string& moment, const std::string& key);

// Elements of a tensor that are a run of bytes of a file.
struct TensorPart {
  size_t file = 0;
  uint64_t offset = 0;           // in the file
  int64_t begin = 0, count = 0;  // elements
};

class CheckpointFiles {
 public:
  explicit CheckpointFiles(const TrainingState& state);

  std::vector<std::string> paths(const std::string& folder) const;
  // All files, at their full size, empty. Throws Error: disk full, no permission.
  void create(const std::string& folder) const;
  int64_t file_bytes() const;  // of all of them
  // The first bytes of each file, before its tensors: rank 0 writes them.
  std::vector<std::string> heads() const;
  // Merges the checksums that the ranks have of what they wrote, `mine` in the order of paths(). Rank 0 gets
  // them by file name, the others nothing. A collective.
  std::map<std::string, FileChecksum> checksums(const std::vector<FileChecksum>& mine,
                                                ProcessGroup& group) const;
  // Calls visitor(tensor, parts) for everything that this rank writes: 1-D tensors, wherever they are, which
  // may not outlive the call. All ranks together visit each element once.
  using Visitor = std::function<void(const at::Tensor& tensor, const std::vector<TensorPart>& parts)>;
  void visit(const TrainingState& state, const Visitor& visitor) const;

 private:
  struct File {
    std::string name;
    SafetensorsLayout layout;
    std::map<std::string, uint64_t> offsets;  // by key
  };
  void add(const std::string& name, std::vector<TensorSpec> specs);

  std::vector<File> files_;  // model, EMAs, moments
};

}  // namespace kiln
