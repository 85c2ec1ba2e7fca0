// Finds the profile that describes the device that this process runs on.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "plan/price/machine_profile.h"

namespace kiln {

// Returns the profile "cpu" on a CPU, and for a GPU its calibrated profile or else the built-in one of its
// kind. Empty if there is none.
std::optional<MachineProfile> profile_of(at::Device device);

// Returns how many such devices this process sees: GPUs, or 1 CPU.
int64_t num_devices(at::Device device);
// Returns how many of this machine's GPUs a plan takes that is not told: the most that divide a step's images
// evenly.
int64_t planned_gpus(int64_t present, int64_t global_batch);

// Returns the FLOP/s of matrix products in this dtype by the data sheet of a GPU, or of a profile, of this
// name. MFU is a share of them. 0 if there is no such figure.
double data_sheet_flops(const std::string& gpu_name, at::ScalarType compute_dtype, bool tf32);
double data_sheet_flops(at::Device device, at::ScalarType compute_dtype, bool tf32);

// Returns the built-in profile that a driver's name of a GPU means: "NVIDIA A100-SXM4-80GB" is A100-80G.
// Empty if unknown.
std::optional<std::string> builtin_profile_named(const std::string& gpu_name);

}  // namespace kiln
