#include "plan/price/machine_profile.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>

#include "core/aten.h"
#include "core/memory_limits.h"
#include "core/tensors.h"
#include "parallel/cpu_share.h"
#include "parallel/machine.h"

namespace kiln {

namespace {

// Assumptions about a CPU that was not calibrated, taken from CPUs that were: shares of the best square
// product and of the copying rate. A CPU merely stores fp16, and bf16 without AVX-512, so products of those
// cost what products of f32 do.
constexpr double kMatmulShare = 0.75, kAttentionShare = 0.35, kCpuBandwidthShare = 0.7;
constexpr double kStored = 0.95;    // of the f32 rate, where bf16 operands are widened before each product
constexpr double kDispatch = 8e-6;  // seconds of one operation through ATen and autograd
constexpr double kCpuDisk = 5e8, kProcess = 3.5e8;  // bytes/s; bytes of libraries and buffers

template <class Work>
double best_seconds(int repeats, Work&& work) {
  using Clock = std::chrono::steady_clock;
  double best = 1e9;
  for (int i = 0; i < repeats; ++i) {
    const auto begin = Clock::now();
    work();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return best;
}

double product_flops(at::ScalarType dtype) {
  constexpr int64_t kSize = 1024;
  const at::Tensor a = at::ones({kSize, kSize}, at::TensorOptions().dtype(dtype)), b = at::ones_like(a);
  at::Tensor product = at::empty_like(a);
  return 2.0 * kSize * kSize * kSize / best_seconds(3, [&] { at::mm_out(product, a, b); });
}

double copy_bytes_per_s() {
  constexpr int64_t kBytes = 32 << 20;  // two of these are larger than a cache
  const at::Tensor from = at::zeros({kBytes}, at::kByte);
  at::Tensor to = at::zeros_like(from);
  return 2.0 * kBytes / best_seconds(3, [&] { to.copy_(from); });
}

}  // namespace

MachineProfile estimate_cpu() {
  static const MachineProfile profile = [] {
    at::NoGradGuard no_grad;
    const ProcessorTimes before = processor_times();
    const double f32 = product_flops(at::kFloat), copying = copy_bytes_per_s();
    const bool stores_bf16 = cpu_product_dtype(at::kBFloat16) == at::kFloat;
    return MachineProfile{
        .name = "cpu",
        .source = "estimate from a short measurement: kiln plan --calibrate measures it",
        .machine = machine_name(at::kCPU),
        .device = DryRunDevice::kCpu,
        .memory_bytes = host_memory().total_bytes,
        .context_bytes = static_cast<int64_t>(kProcess),
        .peak_flops = {{at::kFloat, f32},
                       {at::kHalf, f32},
                       {at::kBFloat16, stores_bf16 ? kStored * f32 : product_flops(at::kBFloat16)}},
        .memory_bytes_per_s = copying,
        .op_overhead_s = kDispatch,
        .host_link_bytes_per_s = copying,
        .peer_bytes_per_s = kRankShare * copying,
        .rank_hop_s = kRankHop,
        .disk_bytes_per_s = kCpuDisk,
        .gpus_per_node = 1,
        .matmul_efficiency = kMatmulShare,
        .attention_efficiency = kAttentionShare,
        .bandwidth_efficiency = kCpuBandwidthShare,
        .speed = {.taken =
                      taken_share(processor_times().since(before), processors_of(at::get_num_threads()))}};
  }();
  return profile;
}

}  // namespace kiln
