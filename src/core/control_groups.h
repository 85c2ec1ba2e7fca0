// The control groups (cgroups) that limit this process. Torch-free.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace kiln {

struct ControlGroup {
  std::filesystem::path folder;  // may be missing: in a container the path may be the host's
  bool is_version_2 = true;
};
// Returns this process's control group and all above it that may limit `controller` ("memory", "cpu"), of
// both versions. `root`: the folder of proc and sys, if not /.
std::vector<ControlGroup> control_groups(const std::string& controller, const std::string& root = "");

// Returns how many processors' time the control groups allow, or nothing if they set no limit. A container
// that may use half of the time of 8 processors has 4.
std::optional<double> cpu_quota(const std::string& root = "");

}  // namespace kiln
