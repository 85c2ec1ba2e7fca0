#include "core/control_groups.h"

#include <algorithm>
#include <fstream>

namespace kiln {

namespace fs = std::filesystem;

namespace {

void add_with_parents(std::vector<ControlGroup>& groups, const fs::path& mount, fs::path group,
                      bool is_version_2) {
  for (bool is_top = false; !is_top; group = group.parent_path()) {
    is_top = !group.has_relative_path();
    groups.push_back({mount / group.relative_path(), is_version_2});
  }
}

// Returns the quota of one group: "200000 100000" or "max 100000" in version 2, two files in version 1, where
// -1 is no limit.
std::optional<double> quota_of(const ControlGroup& group) {
  double quota = 0, period = 0;
  if (group.is_version_2) {
    std::ifstream(group.folder / "cpu.max") >> quota >> period;
  } else {
    std::ifstream(group.folder / "cpu.cfs_quota_us") >> quota;
    std::ifstream(group.folder / "cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? std::optional(quota / period) : std::nullopt;
}

}  // namespace

std::vector<ControlGroup> control_groups(const std::string& controller, const std::string& root) {
  const fs::path top = root.empty() ? "/" : root;
  std::vector<ControlGroup> groups;
  std::ifstream file(top / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // hierarchy:controllers:path
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",",
                      path = line.substr(second + 1);
    if (controllers == ",,")
      add_with_parents(groups, top / "sys/fs/cgroup", path, /*is_version_2=*/true);
    else if (controllers.find("," + controller + ",") != std::string::npos)
      add_with_parents(groups, top / "sys/fs/cgroup" / controller, path, /*is_version_2=*/false);
  }
  return groups;
}

std::optional<double> cpu_quota(const std::string& root) {
  std::optional<double> lowest;
  for (const ControlGroup& group : control_groups("cpu", root))
    if (const std::optional<double> quota = quota_of(group))
      lowest = std::min(*quota, lowest.value_or(*quota));
  return lowest;
}

}  // namespace kiln
