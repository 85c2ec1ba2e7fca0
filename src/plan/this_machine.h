// Which profile describes the device that this process runs on.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "plan/machine_profile.h"

namespace kiln {

// "cpu" on a CPU; for a GPU its calibrated profile, else the built-in one of its kind. Empty when there is
// none.
std::optional<MachineProfile> profile_of(at::Device device);

// The built-in profile that a driver's name of a GPU means: "NVIDIA A100-SXM4-80GB" is A100-80G. Empty when
// unknown.
std::optional<std::string> builtin_profile_named(const std::string& gpu_name);

}  // namespace kiln
