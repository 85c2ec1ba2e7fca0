// Known GPUs. Peaks, memory bandwidth, links and watts are the vendor's figures (dense, not sparse; half
// precision with f32 accumulation; one way; SXM boards where there are several), from its data sheets and
// white papers, compared with independent copies of them. The sources differ in this: GeForce boards multiply
// at half their rate when they accumulate in f32, which data sheets leave out (measured products of an RTX
// 3090 reach 75 TFLOP/s, with a higher clock than the nominal one). An A800 is an A100 but for NVLink, 400 of
// 600 GB/s both ways. For B200, sheets say 75 or 80 TFLOP/s in f32 and 1.1 PFLOP/s in tf32, which is half of
// bf16's. Everything else is an assumption, with its reason, in this file.
#include "plan/price/machine_profile.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <string_view>

#include "core/units.h"

namespace kiln {

namespace {

constexpr double kTera = 1e12, kGiga = 1e9, kMicro = 1e-6;

// Assumption: pinned copies and NCCL's rings reach this share of a link's nominal rate. 25 of 31.5 GB/s on
// PCIe 4, 233 of 300 GB/s on an A100's NVLink (NVIDIA/nccl-tests issue 175) and 370 of 450 on an H100's (212)
// are measured.
constexpr double kLinkShare = 0.8;
// Assumption: a large elementwise kernel's share of the memory bandwidth (1.7 of 2.0 TB/s on an A100).
constexpr double kBandwidthShare = 0.85;
// Assumption: from the end of one kernel to full speed in the next.
constexpr double kKernelGap = 4 * kMicro;
// Assumption: one good NVMe disk, written and read.
constexpr double kDisk = 2 * kGiga;

// One way, bytes/s.
constexpr double kPcie3 = 15.75 * kGiga, kPcie4 = 31.5 * kGiga, kPcie5 = 63 * kGiga;

// Assumption: CUDA context with the modules of ATen, cuBLAS and cuDNN that training loads lazily; 470 to 510
// MiB are seen for a bare process on an RTX 4090, more with more processors. cuBLAS' workspace is not in it:
// it comes from the caching allocator.
constexpr int64_t kContext = 550 * kMiB, kContextHopper = 700 * kMiB, kContextBlackwell = 900 * kMiB;

// The workspace that torch gives cuBLAS for one stream (parseChosenWorkspaceSize,
// ATen/cuda/CublasHandlePool.cpp).
constexpr int64_t kWorkspace = 2 * 4 * kMiB + 128 * 1024, kWorkspaceHopper = 32 * kMiB;

// CUDA 13, which torch 2.11 is built with, begins at compute capability 7.5.
constexpr std::string_view kTooOld = "V100";

// Ada, Hopper and Blackwell multiply in fp8. All their data sheets say twice the half-precision rate.
const std::set<std::string_view> kWithFp8 = {"RTX-4060", "RTX-4070", "RTX-4090", "RTX-5090", "RTX-6000-Ada",
                                             "L4",       "L40S",     "H100",     "H200",     "B200"};

// Bus bandwidths of all-reduces on 8 GPUs whose switches sum, as measured (NVIDIA/nccl-tests issues 212 and
// 272, NVIDIA/nccl issue 1807). By definition such a bandwidth is that of the sums times 2 (8 - 1) / 8.
const std::map<std::string_view, double> kSwitchSums = {
    {"H100", 480 * kGiga}, {"H200", 475 * kGiga}, {"B200", 830 * kGiga}};
constexpr double kSumFactor = 2.0 * (8 - 1) / 8;

// Assumptions: the machines that GPUs are in. PCIe boards have one network card for all of them; SXM boards a
// card for each GPU as in NVIDIA's own systems (DGX A100: 8 x 200, DGX H100 and B200: 8 x 400; DGX-1V: 4 x
// 100).
struct Node {
  int64_t gpus;
  double network;  // nominal, Gbit/s
};
constexpr Node kPcieNode{4, 100}, kDgx1{8, 400}, kDgxA100{8, 1600}, kDgxH100{8, 3200};

struct Gpu {
  const char* name;
  double memory_gib;  // the total that CUDA reports, which is less than the box says
  int64_t context_bytes;
  double f32, tf32, half;  // TFLOP/s; half: bf16 and fp16 with f32 accumulation
  bool has_bf16;
  double memory_bytes_per_s, pcie, peer;  // nominal
  Node node;                              // the usual one
  int64_t num_processors;
  double watts;
  // Assumptions: shares of the half-precision peak that cuBLAS reaches on large products, and fused attention
  // at the few hundred tokens of latents. They fall where the power limit or the memory cannot follow the
  // tensor cores (T4: 70 W; Hopper and Blackwell: flash attention 2 uses half of what their tensor cores
  // offer).
  double matmul, attention;
};

constexpr double kNvlink2 = 150 * kGiga, kNvlink3 = 300 * kGiga, kNvlink4 = 450 * kGiga,
                 kNvlink5 = 900 * kGiga;
constexpr double kNoPeer = kPcie4 / 2;  // consumer boards: through host memory, so each byte crosses twice

const Gpu kGpus[] = {
    {"V100", 31.73, kContext, 15.7, 0, 125, false, 900e9, kPcie3, kNvlink2, kDgx1, 80, 300, 0.75, 0.2},
    {"T4", 14.56, kContext, 8.1, 0, 65, false, 320e9, kPcie3, kPcie3 / 2, kPcieNode, 40, 70, 0.5, 0.15},
    {"RTX-2080-Ti", 10.76, kContext, 13.4, 0, 53.8, false, 616e9, kPcie3, kPcie3 / 2, kPcieNode, 68, 250,
     0.75, 0.2},
    {"RTX-3060", 11.76, kContext, 12.7, 12.7, 25.5, true, 360e9, kPcie4, kNoPeer, kPcieNode, 28, 170, 0.85,
     0.5},
    // Eight lanes of PCIe.
    {"RTX-4060", 7.63, kContext, 15.1, 15.1, 30.2, true, 272e9, kPcie4 / 2, kPcie4 / 4, kPcieNode, 24, 115,
     0.85, 0.5},
    {"RTX-4070", 11.72, kContext, 29.1, 29.1, 58.3, true, 504e9, kPcie4, kNoPeer, kPcieNode, 46, 200, 0.85,
     0.5},
    {"L4", 22.03, kContext, 30.3, 60, 121, true, 300e9, kPcie4, kPcie4, kPcieNode, 58, 72, 0.5, 0.25},
    {"A10", 22.06, kContext, 31.2, 62.5, 125, true, 600e9, kPcie4, kPcie4, kPcieNode, 72, 150, 0.65, 0.35},
    {"RTX-3090", 23.56, kContext, 35.6, 35.6, 71, true, 936e9, kPcie4, kNoPeer, kPcieNode, 82, 350, 0.85,
     0.5},
    {"RTX-4090", 23.52, kContext, 82.6, 82.6, 165.2, true, 1008e9, kPcie4, kNoPeer, kPcieNode, 128, 450, 0.85,
     0.5},
    {"RTX-5090", 31.36, kContextBlackwell, 104.8, 104.8, 209.5, true, 1792e9, kPcie5, kPcie5 / 2, kPcieNode,
     170, 575, 0.85, 0.5},
    {"RTX-6000-Ada", 44.43, kContext, 91.1, 182, 364, true, 960e9, kPcie4, kPcie4, kPcieNode, 142, 300, 0.65,
     0.35},
    {"A40", 44.34, kContext, 37.4, 74.8, 149.7, true, 696e9, kPcie4, kPcie4, kPcieNode, 84, 300, 0.65, 0.35},
    {"L40S", 44.39, kContext, 91.6, 183, 362, true, 864e9, kPcie4, kPcie4, kPcieNode, 142, 350, 0.65, 0.35},
    {"A100-40G", 39.38, kContext, 19.5, 156, 312, true, 1555e9, kPcie4, kNvlink3, kDgxA100, 108, 400, 0.8,
     0.35},
    {"A100-80G", 79.14, kContext, 19.5, 156, 312, true, 2039e9, kPcie4, kNvlink3, kDgxA100, 108, 400, 0.8,
     0.35},
    {"A800-80G", 79.14, kContext, 19.5, 156, 312, true, 2039e9, kPcie4, 200 * kGiga, kDgxA100, 108, 400, 0.8,
     0.35},
    {"H100", 79.10, kContextHopper, 67, 495, 989, true, 3350e9, kPcie5, kNvlink4, kDgxH100, 132, 700, 0.68,
     0.25},
    {"H200", 139.71, kContextHopper, 67, 495, 989, true, 4800e9, kPcie5, kNvlink4, kDgxH100, 132, 700, 0.7,
     0.25},
    // Memory as the driver reports it: a bus of 7,680 bits at 3,996 MHz, where data sheets round up to 8
    // TB/s.
    {"B200", 178.35, kContextBlackwell, 75, 1125, 2250, true, 7672e9, kPcie5, kNvlink5, kDgxH100, 148, 1000,
     0.65, 0.15},
};

MachineProfile profile_of(const Gpu& gpu) {
  MachineProfile profile{.name = gpu.name,
                         .source = "vendor figures",
                         .memory_bytes = static_cast<int64_t>(gpu.memory_gib * kGiB),
                         .context_bytes = gpu.context_bytes,
                         .workspace_bytes = gpu.context_bytes == kContext ? kWorkspace : kWorkspaceHopper,
                         .peak_flops = {{at::kFloat, gpu.f32 * kTera}, {at::kHalf, gpu.half * kTera}},
                         .tf32_flops = gpu.tf32 * kTera,
                         .memory_bytes_per_s = gpu.memory_bytes_per_s,
                         .op_overhead_s = kKernelGap,
                         .host_link_bytes_per_s = gpu.pcie * kLinkShare,
                         .peer_bytes_per_s = gpu.peer * kLinkShare,
                         .network_bytes_per_s = network_rate(gpu.node.network),
                         .disk_bytes_per_s = kDisk,
                         .gpus_per_node = gpu.node.gpus,
                         .num_processors = gpu.num_processors,
                         .watts = gpu.watts,
                         .runs_kiln = std::string_view(gpu.name) != kTooOld,
                         .matmul_efficiency = gpu.matmul,
                         .attention_efficiency = gpu.attention,
                         .bandwidth_efficiency = kBandwidthShare};
  if (const auto sums = kSwitchSums.find(gpu.name); sums != kSwitchSums.end())
    profile.switch_sum_bytes_per_s = sums->second / kSumFactor;
  if (gpu.has_bf16) profile.peak_flops[at::kBFloat16] = gpu.half * kTera;
  if (kWithFp8.contains(gpu.name)) profile.peak_flops[at::kFloat8_e4m3fn] = 2 * gpu.half * kTera;
  return profile;
}

}  // namespace

const std::vector<MachineProfile>& builtin_profiles() {
  static const std::vector<MachineProfile> profiles = [] {
    std::vector<MachineProfile> list;
    list.reserve(std::size(kGpus));
    for (const Gpu& gpu : kGpus) list.push_back(profile_of(gpu));
    return list;
  }();
  return profiles;
}

const MachineProfile& nearest_in_memory(int64_t bytes, at::ScalarType dtype) {
  return *std::ranges::min_element(builtin_profiles(), {}, [&](const MachineProfile& profile) {
    const bool serves = profile.runs_kiln && profile.peak_flops.contains(dtype);
    return std::pair(!serves, std::abs(profile.memory_bytes - bytes));
  });
}

}  // namespace kiln
