#include "core/memory_limits.h"

#include <jemalloc/jemalloc.h>
#include <sys/prctl.h>
#include <sys/types.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "core/control_groups.h"

#pragma weak mallctl  // null where jemalloc is not linked

namespace kiln {

namespace {

namespace fs = std::filesystem;

// What one version of control groups calls its files.
struct GroupFiles {
  const char *limit, *usage, *inactive_files, *active_files;
};
constexpr GroupFiles kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                                  "total_active_file"};
constexpr GroupFiles kVersion2 = {"memory.max", "memory.current", "inactive_file", "active_file"};

// Reads a number. Returns nothing if there is no such file or it holds a word ("max": no limit).
std::optional<int64_t> number_in(const fs::path& path) {
  std::ifstream file(path);
  int64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;
}

// Returns the number after `key` in a file of keys and numbers, or 0 if the key is not there.
int64_t number_of(const fs::path& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line))
    if (line.starts_with(key + " ") || line.starts_with(key + ":"))
      return std::stoll("0" +
                        line.substr(std::min(line.size(), line.find_first_of("123456789", key.size()))));
  return 0;
}

// Applies the limit of a group, if it sets one.
void apply_limit(HostMemory& memory, const fs::path& folder, const GroupFiles& files) {
  const std::optional<int64_t> limit = number_in(folder / files.limit);
  if (!limit) return;
  memory.total_bytes = std::min(memory.total_bytes, *limit);
  const int64_t cached = number_of(folder / "memory.stat", files.inactive_files) +
                         number_of(folder / "memory.stat", files.active_files) +
                         number_of(folder / "memory.stat", "slab_reclaimable");  // only version 2 has it
  const int64_t used = std::max<int64_t>(0, number_in(folder / files.usage).value_or(0) - cached);
  memory.available_bytes = std::min(memory.available_bytes, std::max<int64_t>(0, *limit - used));
}

}  // namespace

HostMemory host_memory(const std::string& root) {
  constexpr int64_t kKib = 1024;
  const fs::path top = root.empty() ? "/" : root;
  HostMemory memory{.total_bytes = number_of(top / "proc/meminfo", "MemTotal") * kKib,
                    .available_bytes = number_of(top / "proc/meminfo", "MemAvailable") * kKib};
  for (const ControlGroup& group : control_groups("memory", root))
    apply_limit(memory, group.folder, group.is_version_2 ? kVersion2 : kVersion1);
  return memory;
}

void return_freed_memory() {
  // Turns huge pages off. A huge page is resident as a whole once one of its bytes is, and a quarter of a
  // tensor's size class may be unused.
  ::prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
  if (!mallctl) return;
  ssize_t at_once = 0;
  mallctl("arenas.dirty_decay_ms", nullptr, nullptr, &at_once, sizeof(at_once));
  mallctl("arenas.muzzy_decay_ms", nullptr, nullptr, &at_once, sizeof(at_once));
  unsigned num_arenas = 0;
  size_t size = sizeof(num_arenas);
  if (mallctl("arenas.narenas", &num_arenas, &size, nullptr, 0) != 0) return;
  // Arenas that no thread has used yet refuse. They take the settings above when they are created.
  for (unsigned arena = 0; arena < num_arenas; ++arena)
    for (const char* kind : {"dirty", "muzzy"}) {
      const std::string name = "arena." + std::to_string(arena) + "." + kind + "_decay_ms";
      mallctl(name.c_str(), nullptr, nullptr, &at_once, sizeof(at_once));
    }
}

void trim_heap() {
  // 4096 stands for every arena (MALLCTL_ARENAS_ALL).
  if (mallctl) mallctl("arena.4096.purge", nullptr, nullptr, nullptr, 0);
}

void trim_small_blocks() {
  if (!mallctl) return;
  // With the settings of before_main.cpp: below 16 KiB, and below 2 MiB.
  for (const char* purge : {"arena.0.purge", "arena.1.purge"}) mallctl(purge, nullptr, nullptr, nullptr, 0);
}

}  // namespace kiln
