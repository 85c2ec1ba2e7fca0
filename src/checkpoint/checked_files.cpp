#include "checkpoint/checked_files.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/error_message.h"

namespace kiln {

namespace {

namespace fs = std::filesystem;

void tell(const std::string& damage) {
  fmt::print(stderr, "warning: passed over, it is damaged: {}\n", damage);
}

std::string damage_of_file(const fs::path& path) try {
  const std::string folder = path.parent_path().string();
  for (const CheckpointFile& file : read_file_list(folder))
    if (file.name == path.filename() && !file.checksum.empty())
      return damage_of(folder, file, checksum_of_bytes(path.string(), 0, file.bytes));
  return "";
} catch (const Error& error) {
  return bare_message_of(error);
}

}  // namespace

std::string damage_of(const std::string& checkpoint_folder, const CheckpointFile& file,
                      const FileChecksum& found) {
  if (file.checksum.empty() || found.of_file(file.bytes) == file.checksum) return "";
  return fmt::format("{} of {} has other bytes than were written", file.name, checkpoint_folder);
}

std::string newest_checked_file(const std::string& run,
                                const std::function<std::string(const std::string& folder)>& choose) {
  std::ranges::for_each(damaged_checkpoints(run), tell);
  std::vector<Checkpoint> checkpoints = list_checkpoints(run);
  for (; !checkpoints.empty(); checkpoints.pop_back()) {
    const std::string path = choose(checkpoints.back().folder);
    const std::string damage = damage_of_file(path);
    if (damage.empty()) return path;
    tell(damage);
  }
  return "";
}

}  // namespace kiln
