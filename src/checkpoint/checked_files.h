// Whether the bytes of a checkpoint's files are those that were written. Torch-free.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/train_state.h"

namespace kiln {

// What is wrong with a file whose bytes add up to `found`: "model.safetensors of
// RUN/checkpoints/step-00001000 has other bytes than were written"; empty: nothing, or an older checkpoint
// does not tell.
std::string damage_of(const std::string& checkpoint_folder, const CheckpointFile& file,
                      const FileChecksum& found);

// The one that `choose` names among the files of the newest complete checkpoint where it is as it was
// written; empty when there are no checkpoints yet. Those that are passed over are told on stderr. For
// readers of one file, which is read as a whole. Throws Error: one that cannot be read, all that are damaged.
std::string newest_checked_file(const std::string& run,
                                const std::function<std::string(const std::string& folder)>& choose);

}  // namespace kiln
