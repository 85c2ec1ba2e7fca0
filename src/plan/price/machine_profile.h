// How fast a machine is and what it holds: vendors' figures for known GPUs, measured ones where calibrated.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/dry_run.h"
#include "plan/price/machine_clock.h"
#include "plan/price/operation_table.h"

namespace kiln {

// Measured seconds of an operation at one amount of work.
struct RatePoint {
  double work = 0;  // FLOPs of products and attention, else bytes
  double seconds = 0;
  int64_t m = 0, n = 0, k = 0;  // as in OpRecord; 0 where it has none
};

struct MachineProfile {
  std::string name;       // "A100-80G", "cpu"
  std::string source;     // "vendor figures", "estimate ...", "measured on <machine>, <date>"
  std::string machine{};  // that was measured, as its processor or GPU calls itself; else empty
  bool measured = false;
  DryRunDevice device = DryRunDevice::kCuda;

  int64_t memory_bytes = 0;  // that programs can allocate on the device; on a CPU the machine's
  int64_t context_bytes =
      0;  // taken before the first tensor: CUDA context and libraries; the process on a CPU
  int64_t workspace_bytes = 0;  // that cuBLAS takes from the allocator at a thread's first product, and keeps
  std::map<at::ScalarType, double> peak_flops;  // dense matrix products; a dtype that is not there cannot run
  double tf32_flops = 0;                        // f32 products under --tf32; 0: the device has none
  double memory_bytes_per_s = 0;
  double op_overhead_s = 0;          // launch (CUDA) or dispatch (CPU) of one operation
  double host_link_bytes_per_s = 0;  // to host memory, one way
  double peer_bytes_per_s = 0;       // to another GPU of the node (NVLink or PCIe), one way
  double node_bytes_per_s = 0;       // between nodes, per GPU, one way
  double disk_bytes_per_s = 0;
  int64_t gpus_per_node = 8;
  int64_t num_processors = 0;  // streaming multiprocessors, or cores: products are cut into tiles for them
  double watts = 0;
  bool runs_kiln = true;  // false: the CUDA that this build's torch is made with no longer knows the GPU

  // Share of the peak that large operations reach, where nothing was measured.
  double matmul_efficiency = 0, attention_efficiency = 0, bandwidth_efficiency = 0;
  // Measured: "name dtype" -> points in ascending work.
  std::map<std::string, std::vector<RatePoint>> rates{};
  OperationTable operations{};  // the same in their very shapes, which go before the rates
  MachineClock clock{};         // when all that was measured
  MachineSpeed speed{};         // at present, against that; of this process, not of the file
};

// V100 to B200, consumer boards of 8 to 32 GB among them: builtin_profiles.cpp.
const std::vector<MachineProfile>& builtin_profiles();
// The built-in GPU that runs Kiln, multiplies in this dtype and whose memory is nearest to so many bytes.
const MachineProfile& nearest_in_memory(int64_t bytes, at::ScalarType dtype = at::kFloat);
// This machine's CPU where nobody has calibrated it: from a tenth of a second of measurement, once per
// process.
MachineProfile estimate_cpu();
// By name, case, spaces and dashes ignored; "cpu" is this machine's (calibrated when there is such a profile,
// else a quick estimate), at its present speed. Profiles of profiles_folder() go before built-in ones. Throws
// Error offering the closest names.
MachineProfile find_profile(const std::string& name);
// Whether the present speed of this machine can be told against the profile. The clock was read on all
// processors; with fewer threads it would say nothing of the machine.
bool has_clock(const MachineProfile& profile);
// The same machine with f32 products in TF32, where it has that.
MachineProfile with_tf32(MachineProfile profile);
// What it multiplies in where half the bits are enough: bf16, before Ampere fp16.
inline at::ScalarType half_dtype_of(const MachineProfile& machine) {
  return machine.peak_flops.contains(at::kBFloat16) ? at::kBFloat16 : at::kHalf;
}
// Throws Error when the machine has no matrix products in this dtype (bf16 before Ampere).
void check_dtype(const MachineProfile& machine, at::ScalarType compute_dtype);

// A training's: torch gives each thread a handle of cuBLAS, and autograd runs a GPU's backward in a thread of
// its own.
inline constexpr int64_t kProductThreads = 2;
inline int64_t workspaces_bytes(const MachineProfile& machine) {
  return kProductThreads * machine.workspace_bytes;
}

nlohmann::json to_json(const MachineProfile& profile);
// Throws Error naming the field that is missing or wrong.
MachineProfile profile_from_json(const nlohmann::json& json);
// Where calibrated profiles are kept: $KILN_PROFILES, else $XDG_CONFIG_HOME/kiln/profiles, else
// ~/.config/kiln/profiles.
std::string profiles_folder();
// Writes the profile into profiles_folder(), whole or not at all, and returns the path. Throws Error.
std::string store_profile(const MachineProfile& profile);

}  // namespace kiln
