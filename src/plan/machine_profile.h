// How fast a machine is and what it holds: vendors' figures for known GPUs, measured ones where calibrated.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/dry_run.h"
#include "plan/op_recorder.h"

namespace kiln {

// Measured seconds of an operation over its work, in ascending work; between points the time is interpolated.
struct RatePoint {
  double work = 0;  // FLOPs, or bytes for elementwise operations
  double seconds = 0;
};

struct MachineProfile {
  std::string name;    // "A100-80G", "this CPU"
  std::string source;  // "vendor figures" or "measured on <machine>, <date>"
  bool measured = false;
  DryRunDevice device = DryRunDevice::kCuda;

  int64_t memory_bytes = 0;         // of the device; on a CPU the machine's
  int64_t context_bytes = 0;        // taken before the first tensor: CUDA context and libraries; the process on a CPU
  std::map<at::ScalarType, double> peak_flops;  // dense matrix products
  double memory_bytes_per_s = 0;
  double op_overhead_s = 0;         // launch (CUDA) or dispatch (CPU) of one operation
  double host_link_bytes_per_s = 0; // to host memory, one way
  double peer_bytes_per_s = 0;      // all-reduce bus bandwidth within a node (NVLink or PCIe), one way
  double node_bytes_per_s = 0;      // between nodes, per GPU
  double disk_bytes_per_s = 0;
  int64_t gpus_per_node = 8;
  double watts = 0;

  // Share of the peak that large operations reach, where nothing was measured.
  double matmul_efficiency = 0, attention_efficiency = 0, bandwidth_efficiency = 0;
  // Measured: "name dtype" -> points.
  std::map<std::string, std::vector<RatePoint>> rates;
};

// V100, T4, RTX-3090, RTX-4090, A40, L40S, A100-40G, A100-80G, A800-80G, H100, H200, B200.
const std::vector<MachineProfile>& builtin_profiles();
// By name, case and dashes ignored; "cpu" is this machine's (calibrated when there is such a profile). Throws Error
// offering the closest names.
MachineProfile find_profile(const std::string& name);

nlohmann::json to_json(const MachineProfile& profile);
MachineProfile profile_from_json(const nlohmann::json& json);
// Where calibrated profiles are kept: $KILN_PROFILES, else $XDG_CONFIG_HOME/kiln/profiles, else ~/.config/kiln/profiles.
std::string profiles_folder();

}  // namespace kiln
