#include "checkpoint/train_state.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "core/error.h"
#include "core/files/entries.h"
#include "core/text/printable.h"
#include "core/text/some_of.h"

namespace kiln {

namespace {

namespace fs = std::filesystem;

void tell(const std::string& damage) {
  fmt::print(stderr, "warning: passed over, it is damaged: {}\n", printable(damage));
}

std::string damage_of_file(const fs::path& path) {
  const std::string folder = path.parent_path().string();
  for (const CheckpointFile& file : read_file_list(folder))
    if (file.name == path.filename() && !file.checksum.empty())
      return damage_of(folder, file, checksum_of_bytes(path.string(), 0, file.bytes));
  return "";
}

// Returns the file of a checkpoint of which only some files were copied, or "" if it is not whole.
std::string shipped_file(const std::string& folder,
                         const std::function<std::string(const std::string& folder)>& choose) {
  try {
    for (const CheckpointFile& file : read_file_list(folder)) {
      const fs::path path = fs::path(folder) / file.name;
      if (fs::exists(path) && fs::file_size(path) != file.bytes) return "";
    }
    const std::string path = choose(folder);
    return fs::exists(path) && damage_of_file(path).empty() ? path : "";
  } catch (const std::exception&) {  // no checkpoint, or without that file
    return "";
  }
}

// The same for the newest such checkpoint of a run that has no complete one.
std::string newest_shipped_file(const std::string& run,
                                const std::function<std::string(const std::string& folder)>& choose) {
  std::vector<std::string> folders;
  for (const auto& entry : readable_entries_of(fs::path(run) / "checkpoints"))
    if (entry.path().filename().string().starts_with("step-")) folders.push_back(entry.path().string());
  std::ranges::sort(folders, std::greater());
  for (const std::string& folder : folders)
    if (std::string path = shipped_file(folder, choose); !path.empty()) return path;
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
  if (path.empty()) {
    if (std::string shipped = newest_shipped_file(run, choose); !shipped.empty()) return shipped;
  }
  if (path.empty() && !damaged.empty())
    fail("checkpoint", "none of the {} checkpoints of {} is whole: {}: restore one from a copy",
         damaged.size(), run, some_of(damaged, "; "));
  std::ranges::for_each(damaged, tell);
  return path;
}

}  // namespace kiln
