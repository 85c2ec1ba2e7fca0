// Which bytes of a checkpoint's files come from which part of the training state. Every tensor is whole in
// its file; weights are f32 or as the master is kept. The ranks divide the bytes among them.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/file_checksum.h"
#include "checkpoint/safetensors.h"
#include "step/training_state.h"

namespace kiln {

// Returns the key of a moment: "exp_avg.blocks.0.attn.qkv.weight".
std::string moment_key(const std::string& moment, const std::string& key);

// A run of elements of a tensor that is a run of bytes in a file.
struct TensorPart {
  size_t file = 0;
  uint64_t offset = 0;           // in the file
  int64_t begin = 0, count = 0;  // elements
};

class CheckpointFiles {
 public:
  explicit CheckpointFiles(const TrainingState& state);

  std::vector<std::string> paths(const std::string& folder) const;
  // Creates all files at their full size, empty. Throws Error: disk full, no permission.
  void create(const std::string& folder) const;
  int64_t file_bytes() const;  // of all of them
  // Returns the first bytes of each file, before its tensors. Rank 0 writes them.
  std::vector<std::string> heads() const;
  // Merges the checksums of what each rank wrote. `mine` is in the order of paths(). Rank 0 gets the result
  // by file name; the other ranks get nothing. A collective.
  std::map<std::string, FileChecksum> checksums(const std::vector<FileChecksum>& mine,
                                                ProcessGroup& group) const;
  // Calls visitor(tensor, parts) for everything that this rank writes. The tensors are 1-D, on any device,
  // and may not outlive the call. All ranks together visit each element once.
  using Visitor = std::function<void(const at::Tensor& tensor, const std::vector<TensorPart>& parts)>;
  void visit(const TrainingState& state, const Visitor& visitor) const;

 private:
  struct File {
    std::string name;
    SafetensorsLayout layout;
    std::map<std::string, uint64_t> offsets;  // by key
  };
  void add(const std::string& name, std::vector<TensorSpec> specs);

  std::vector<File> files_;  // model, EMAs, moments, and the head if there is one
};

struct CheckpointSpace {
  std::string run;
  int64_t bytes = 0;      // of a checkpoint
  int64_t keep = 0;       // newest ones that stay; 0: all
  int64_t num_ahead = 0;  // that are still to be written
  int64_t available = 0;  // bytes free on the disk
};

// Returns the bytes free on the disk of a run, or the largest number if the system does not say.
int64_t available_bytes(const std::string& run);

// Returns a warning if the disk has no room for all checkpoints that the run will hold, else "". Throws Error
// if the next one does not fit beside those that make_room() leaves.
std::string check_space(const CheckpointSpace& space);

// If the next checkpoint does not fit, removes the older ones that would be removed after it. The newest
// complete one stays: however the run ends, there is one.
void make_room(const CheckpointSpace& space);

}  // namespace kiln
