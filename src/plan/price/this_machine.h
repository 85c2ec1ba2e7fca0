// Which profile describes the device that this process runs on.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "plan/price/machine_profile.h"

namespace kiln {

// "cpu" on a CPU; for a GPU its calibrated profile, else the built-in one of its kind. Empty when there is
// none.
std::optional<MachineProfile> profile_of(at::Device device);

// FLOP/s of matrix products in this dtype by the data sheet of a GPU, or of a profile, of this name: what MFU
// is a share of. 0 where there is no such figure.
double data_sheet_flops(const std::string& gpu_name, at::ScalarType compute_dtype, bool tf32);
double data_sheet_flops(at::Device device, at::ScalarType compute_dtype, bool tf32);

// The built-in profile that a driver's name of a GPU means: "NVIDIA A100-SXM4-80GB" is A100-80G. Empty when
// unknown.
std::optional<std::string> builtin_profile_named(const std::string& gpu_name);

}  // namespace kiln
