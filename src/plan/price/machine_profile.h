// A machine's speed and memory: vendors' figures for known GPUs, measured ones where it was calibrated.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/dry_run.h"
#include "core/json.h"
#include "data/images/image_header.h"
#include "plan/price/machine_clock.h"
#include "step/span.h"

namespace kiln {

// The speed of the disks that a run reads from and offloads to.
struct DiskSpeed {
  std::string folder;       // where it was measured
  std::string file_system;  // "ext4", "NFS"; empty: not known
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;  // 0: not known
};

// Reads up to 256 MiB of the files below `path` that the system does not keep in memory, for at most about 5
// seconds. With `may_write` also writes a file there and reads it back, which takes as long again; it has no
// name while it is there. A speed of which too little could be measured is 0.
DiskSpeed measure_disk(const std::string& path, bool may_write);
// Returns the one whose reading was measured on the file system of `path`; null: none, or the path does not
// exist here.
const DiskSpeed* disk_of(const std::vector<DiskSpeed>& disks, const std::string& path);

// Seconds that one thread takes to read a picture: a fixed part and one for each pixel.
struct PictureRate {
  double fixed_s = 0, pixel_s = 0;
  double seconds(double pixels) const { return fixed_s + pixels * pixel_s; }
};

struct DecodingRates {
  std::map<PictureFormat, PictureRate> formats{};  // decoding, of pixels as stored
  PictureRate halve{};  // halving a picture of twice the wanted sides or more, of its pixels
  PictureRate crop{};   // resizing, cropping and conversion to values, of the pixels that are resized
  bool is_measured = false;

  // Returns the seconds from a file in memory to an autoencoder's input: a square of this side, or if that is
  // 0 a bucket, for which nothing is halved.
  double seconds(const ImageHeader& picture, int64_t square) const;
};

// Those of one core of a server's processor: decoding and halving of photographs as measured in
// benchmarks/results/picture-formats_* (JPEG of quality 90, PNG of zlib's usual level, lossy WebP of quality
// 90), and crops as measure_decoding() finds them there.
DecodingRates builtin_decoding();

// Measures one thread on this machine with pictures that have the spectrum of photographs. Takes about a
// second.
DecodingRates measure_decoding();

std::string dtype_text(c10::ScalarType dtype);  // "bf16"
// "kiln::affine bf16": the key of MachineProfile::rates and of the table.
std::string rate_key(const std::string& op_name, c10::ScalarType dtype);

// Measured seconds of operations in their exact shapes. A machine's prices start from them, before any model
// of how time grows with work. The seconds are averages of one operation within real steps. They leave out
// the time between two operations (MachineProfile::op_overhead_s), and are at the speed that the machine had
// when its clock was read.
class OperationTable {
 public:
  bool empty() const { return seconds_.empty(); }
  size_t size() const;
  std::optional<double> seconds(const OpRecord& op) const;
  void set(const OpRecord& op, double seconds);

  // {"OPERATION DTYPE": [[flops, bytes, m, n, k, seconds], ...]}.
  nlohmann::json to_json() const;
  // Throws Error naming the operation whose entry is not such a list or whose time is not positive.
  static OperationTable from_json(const nlohmann::json& json);

 private:
  using Shape = std::array<double, 5>;  // flops, bytes, m, n, k
  static Shape shape_of(const OpRecord& op);
  std::map<std::string, std::map<Shape, double>, std::less<>> seconds_;  // by rate_key
};

// Measured seconds of an operation at one amount of work.
struct RatePoint {
  double work = 0;  // FLOPs of products and attention, else bytes
  double seconds = 0;
  int64_t m = 0, n = 0, k = 0;  // as in OpRecord; 0 where it has none
};

struct MachineProfile {
  std::string name;       // "A100-80G", "cpu"
  std::string source;     // "vendor figures", "estimate ...", "measured on <machine>, <date>"
  std::string machine{};  // the one that was measured, as its processor or GPU calls itself; else empty
  bool measured = false;
  DryRunDevice device = DryRunDevice::kCuda;

  int64_t memory_bytes = 0;  // what programs can allocate on the device, or on the machine of a CPU
  // Taken before the first tensor: CUDA's context and libraries, or on a CPU the process.
  int64_t context_bytes = 0;
  int64_t workspace_bytes = 0;  // what cuBLAS takes from the allocator at a thread's first product, and keeps
  std::map<at::ScalarType, double> peak_flops;  // dense matrix products; a missing dtype cannot run
  double tf32_flops = 0;                        // f32 products under --tf32; 0: the device has none
  double memory_bytes_per_s = 0;
  double op_overhead_s = 0;          // launch (CUDA) or dispatch (CPU) of one operation
  double host_link_bytes_per_s = 0;  // to host memory, one way
  // To another GPU of the node (NVLink or PCIe), one way; on a CPU what its ranks' rings reach.
  double peer_bytes_per_s = 0;
  double rank_hop_s = 0;  // one message between ranks on a CPU; 0 on GPUs, whose hops are NCCL's
  // Bytes that the switches of a node sum and send back (NVLink SHARP); 0: they cannot.
  double switch_sum_bytes_per_s = 0;
  double network_bytes_per_s = 0;  // between nodes: all network cards of one together, one way
  double disk_bytes_per_s = 0;     // of the data
  // The rate of --nvme-path, where another disk was measured for it. 0: it is disk_bytes_per_s.
  double offload_disk_bytes_per_s = 0;
  int64_t gpus_per_node = 8;
  int64_t num_processors = 0;  // streaming multiprocessors, or cores: products are cut into tiles for them
  double watts = 0;
  bool runs_kiln = true;  // false: the CUDA of this build's torch no longer supports the GPU

  // Share of the peak that large operations reach, where nothing was measured.
  double matmul_efficiency = 0, attention_efficiency = 0, bandwidth_efficiency = 0;
  // Measured: "name dtype" -> points in ascending work.
  std::map<std::string, std::vector<RatePoint>> rates{};
  OperationTable operations{};                  // measured in exact shapes; these go before the rates
  std::vector<DiskSpeed> disks{};               // measured on this machine
  DecodingRates decoding = builtin_decoding();  // of one thread
  MachineClock clock{};                         // while all that was measured
  MachineSpeed speed{};  // at present, against `clock`; known in this process, not stored
};

// Assumption: the share of a network's nominal rate that NCCL's rings reach between nodes (docs/scaling.md).
// It is 0.75 to 0.96 where that was published.
inline constexpr double kNetworkShare = 0.86;
inline double network_rate(double gigabits_per_s) { return gigabits_per_s / 8 * 1e9 * kNetworkShare; }

// Returns how many of a run's ranks are on one machine: all of a CPU's, and all if there is no network.
inline int64_t ranks_on_node(const MachineProfile& machine, int64_t ranks) {
  const bool is_one_machine = machine.device == DryRunDevice::kCpu || machine.network_bytes_per_s <= 0;
  return is_one_machine ? ranks : std::min(ranks, std::max<int64_t>(1, machine.gpus_per_node));
}

// Assumptions about ranks on a CPU that was not calibrated, taken from those that were: seconds of a message
// through Gloo, and the share of the memory's bandwidth that its rings reach.
inline constexpr double kRankHop = 2e-4, kRankShare = 0.04;

// Returns the GPUs of builtin_profiles.cpp: V100 to B200, with consumer boards of 8 to 32 GB.
const std::vector<MachineProfile>& builtin_profiles();
// Returns the built-in GPU that runs Kiln, multiplies in this dtype and has the memory nearest to `bytes`.
const MachineProfile& nearest_in_memory(int64_t bytes, at::ScalarType dtype = at::kFloat);
// Estimates this machine's CPU, in case nobody has calibrated it. Measures for a tenth of a second, once per
// process.
MachineProfile estimate_cpu();
// Finds a profile by name, ignoring case, spaces and dashes. "cpu" is this machine's, at its present speed:
// the calibrated one if there is one, else a quick estimate. Profiles of profiles_folder() go before built-in
// ones. Throws Error offering the closest names.
MachineProfile find_profile(const std::string& name);
// Returns the machine with the measured speeds of the disks that hold these folders, where there are any.
// Empty: none.
MachineProfile with_disks_of(MachineProfile profile, const std::string& data, const std::string& offloaded);
inline double offload_disk(const MachineProfile& machine) {
  return machine.offload_disk_bytes_per_s > 0 ? machine.offload_disk_bytes_per_s : machine.disk_bytes_per_s;
}
// True if the present speed of this machine can be compared with the profile's. The clock was read on all
// processors, so readings with fewer threads would not compare.
bool has_clock(const MachineProfile& profile);
// Returns the same machine with f32 products in TF32, if it has that.
MachineProfile with_tf32(MachineProfile profile);
// Returns the dtype to multiply in where half the bits are enough: bf16, or fp16 before Ampere.
inline at::ScalarType half_dtype_of(const MachineProfile& machine) {
  return machine.peak_flops.contains(at::kBFloat16) ? at::kBFloat16 : at::kHalf;
}
// Throws Error if the machine has no matrix products in this dtype (bf16 before Ampere).
void check_dtype(const MachineProfile& machine, at::ScalarType compute_dtype);

// Threads of a training that compute products. Torch gives each a cuBLAS handle, and autograd runs a GPU's
// backward in a thread of its own. Each handle takes a workspace for each stream: device graphs have one
// stream, beside the one on which the first work of a shape runs.
inline constexpr int64_t kProductThreads = 2;
inline int64_t num_workspaces(bool records_graphs) { return kProductThreads * (records_graphs ? 2 : 1); }
inline int64_t workspaces_bytes(const MachineProfile& machine, bool records_graphs) {
  return num_workspaces(records_graphs) * machine.workspace_bytes;
}

nlohmann::json to_json(const MachineProfile& profile);
// Throws Error naming the field that is missing or wrong.
MachineProfile profile_from_json(const nlohmann::json& stored);
// Returns the folder of calibrated profiles: $KILN_PROFILES, else $XDG_CONFIG_HOME/kiln/profiles, else
// ~/.config/kiln/profiles.
std::string profiles_folder();
// Writes the profile into profiles_folder(), whole or not at all, and returns the path. Throws Error.
std::string store_profile(const MachineProfile& profile);

}  // namespace kiln
