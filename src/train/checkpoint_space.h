// The room that the checkpoints of a run take on its disk.
#pragma once
#include <cstdint>
#include <string>

namespace kiln {

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
