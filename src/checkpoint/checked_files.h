// Checks that a checkpoint's files hold the bytes that were written. Torch-free.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/train_state.h"

namespace kiln {

// Returns what is wrong with a file whose bytes have the checksum `found`: "model.safetensors of
// RUN/checkpoints/step-00001000 has other bytes than were written". Empty if nothing is wrong, or if the
// checkpoint is too old to have checksums.
std::string damage_of(const std::string& checkpoint_folder, const CheckpointFile& file,
                      const FileChecksum& found);

// Returns the file that `choose` names in the newest complete checkpoint in which that file is as it was
// written, or if no checkpoint is complete, in the newest of which only some files
// were copied. Empty if there are no checkpoints yet. Damaged checkpoints that it passes over are reported on
// stderr. For readers of one file, which this reads as a whole. Throws Error if a file cannot be read or all
// checkpoints are damaged.
std::string newest_checked_file(const std::string& run,
                                const std::function<std::string(const std::string& folder)>& choose);

}  // namespace kiln
