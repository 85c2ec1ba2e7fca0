// The checkpoint that a run resumes from.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/train_state.h"
#include "parallel/process_group.h"

namespace kiln {

struct NewestCheckpoint {
  std::optional<Checkpoint> checkpoint{};  // none: there has been none
  std::vector<std::string> damaged{};      // on rank 0: what is wrong with those that were passed over
};

// The newest checkpoint of `run` whose files have the bytes that were written, the same on every rank; each
// reads a part of them. Newer ones that are complete but for their bytes are set aside under another name.
// Throws Error on every rank when one cannot see what rank 0 sees, or when there are checkpoints but all are
// damaged. A collective.
NewestCheckpoint newest_checkpoint(const std::string& run, ProcessGroup& group);

}  // namespace kiln
