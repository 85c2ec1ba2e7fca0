#include "plan/price/attention_engine.h"

#include <algorithm>
#include <array>

#include "plan/price/this_machine.h"

namespace kiln {

bool prefers_cudnn_attention(const MachineProfile& machine) {
  constexpr std::array<std::string_view, 3> kPrefer = {"H100", "H200", "B200"};
  const auto kind = builtin_profile_named(machine.name);  // a calibrated profile has the driver's name
  return kind && std::ranges::find(kPrefer, *kind) != kPrefer.end();
}

TrainOptions traced_options(TrainOptions options, const MachineProfile& machine) {
  // In f32, and on GPUs before Ampere, torch takes the memory-efficient kernels, which pack them.
  const bool is_fused = options.compute.dtype != at::kFloat && machine.peak_flops.contains(at::kBFloat16);
  if (is_fused && (options.compute.deterministic || !prefers_cudnn_attention(machine)))
    options.compute.untried_gpu.leave_out(Untried::kPackedGradients);
  return options;
}

}  // namespace kiln
