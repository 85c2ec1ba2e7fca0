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

}  // namespace kiln
