#include "train/checkpoint_files.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <vector>

#include "checkpoint/train_state.h"
#include "core/error.h"
#include "watch/prediction.h"

namespace kiln {

namespace {

// How many complete checkpoints stay until the next one is whole.
int64_t num_left(int64_t keep) { return std::max<int64_t>(keep - 1, 1); }

}  // namespace

int64_t available_bytes(const std::string& run) {
  constexpr auto kMost = std::numeric_limits<int64_t>::max();
  std::error_code unknown;
  const std::filesystem::space_info space = std::filesystem::space(run, unknown);
  return unknown || space.available > static_cast<uintmax_t>(kMost) ? kMost
                                                                    : static_cast<int64_t>(space.available);
}

std::string check_space(const CheckpointSpace& space) {
  if (space.num_ahead == 0) return "";
  std::vector<double> saved;  // bytes, oldest first
  double held = 0;
  for (const Checkpoint& checkpoint : list_checkpoints(space.run)) {
    double bytes = 0;
    for (const CheckpointFile& file : read_file_list(checkpoint.folder))
      bytes += static_cast<double>(file.bytes);
    saved.push_back(bytes);
    held += bytes;
  }
  const auto free = static_cast<double>(space.available), each = static_cast<double>(space.bytes);
  double room = free;
  if (space.keep > 0)
    for (int64_t i = 0; i + num_left(space.keep) < std::ssize(saved); ++i)
      room += saved[static_cast<size_t>(i)];
  if (room < each)
    fail("train", "{} has room for {}, and a checkpoint takes {}{}: free some space or choose another --out",
         space.run, size_text(room), size_text(each),
         saved.empty() ? "" : " beside the newest one, which stays until the next is whole");
  const int64_t all = std::ssize(saved) + space.num_ahead;
  const int64_t most = space.keep > 0 ? std::min(all, num_left(space.keep) + 1) : all;  // at once
  const double needed = static_cast<double>(most) * each;
  if (needed <= free + held) return "";
  const auto fitting = static_cast<int64_t>((free + held) / each);  // at once
  const int64_t fewest = num_left(1) + 1;                           // at once, however few are kept
  const std::string advice =
      fitting >= fewest
          ? fmt::format("--keep-checkpoints {} keeps the newest only", fitting)
          : fmt::format(
                "the newest stays until the next is whole, so there must be room for two: free {} or "
                "choose another --out",
                size_text(static_cast<double>(fewest) * each - free - held));
  return fmt::format("{} has room for {}, and {} checkpoints of this run take {}: {}", space.run,
                     size_text(free + held), most, size_text(needed), advice);
}

void make_room(const CheckpointSpace& space) {
  if (space.keep > 0 && space.available < space.bytes) prune_checkpoints(space.run, num_left(space.keep));
}

}  // namespace kiln
