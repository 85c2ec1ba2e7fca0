#include "plan/price/attention_engine.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "plan/price/this_machine.h"

namespace kiln {

const char* attention_engine_of(const MachineProfile& machine, const ComputeOptions& compute) {
  constexpr std::array<std::string_view, 3> kPreferCudnn = {"H100", "H200", "B200"};
  const bool is_before_ampere = !machine.peak_flops.contains(at::kBFloat16);
  if (compute.dtype == at::kFloat || is_before_ampere) return "memory-efficient";
  const auto kind = builtin_profile_named(machine.name);  // a calibrated profile has the driver's name
  const bool prefers_cudnn = kind && std::ranges::find(kPreferCudnn, *kind) != kPreferCudnn.end();
  return prefers_cudnn && !compute.deterministic ? "cudnn" : "flash";
}

TrainOptions traced_options(TrainOptions options, const MachineProfile& machine) {
  const bool is_gpu = machine.device == DryRunDevice::kCuda;
  if (is_gpu && std::string_view(attention_engine_of(machine, options.compute)) == "flash")
    options.compute.untried_gpu.leave_out(Untried::kPackedGradients);
  return options;
}

}  // namespace kiln
