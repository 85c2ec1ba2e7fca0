#include "checkpoint/checked_files.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "core/error.h"

namespace kiln {

namespace {

namespace fs = std::filesystem;

void tell(const std::string& damage) {
  fmt::print(stderr, "warning: passed over, it is damaged: {}\n", damage);
}

std::string damage_of_file(const fs::path& path) {
  const std::string folder = path.parent_path().string();
  for (const CheckpointFile& file : read_file_list(folder))
    if (file.name == path.filename() && !file.checksum.empty())
      return damage_of(folder, file, checksum_of_bytes(path.string(), 0, file.bytes));
  return "";
}

}  // namespace

std::string damage_of(const std::string& checkpoint_folder, const CheckpointFile& file,
                      const FileChecksum& found) {
  if (file.checksum.empty() || found.of_file(file.bytes) == file.checksum) return "";
  return fmt::format("{} of {} has other bytes than were written", file.name, checkpoint_folder);
}

std::string newest_checked_file(const std::string& run,
                                const std::function<std::string(const std::string& folder)>& choose) {
  std::vector<std::string> damaged = damaged_checkpoints(run);
  std::string path;
  const std::vector<Checkpoint> checkpoints = list_checkpoints(run);
  for (size_t i = checkpoints.size(); i-- > 0;) {  // newest first
    path = choose(checkpoints[i].folder);
    std::string damage = damage_of_file(path);
    if (damage.empty()) break;
    damaged.push_back(std::move(damage));
    path.clear();
  }
  if (path.empty() && !damaged.empty())
    fail("checkpoint", "none of the {} checkpoints of {} is whole: {}: restore one", damaged.size(), run,
         fmt::join(damaged, "; "));
  std::ranges::for_each(damaged, tell);
  return path;
}

}  // namespace kiln
