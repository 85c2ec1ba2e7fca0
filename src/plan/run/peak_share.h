// The share of a machine's peak that a step reaches.
#pragma once
#include <string>

#include "plan/price/machine_profile.h"
#include "plan/trace/trace.h"

namespace kiln {

struct PeakShare {
  double of_profile = 0, mfu = 0;  // of the profile's peak and of the data sheet's (0: there is none)
  // Why there is no share: it would be more than a device can reach, so the plan counts too much arithmetic
  // or too little time. One line that begins with "internal:" and names the operation. Empty: the share is
  // possible.
  std::string problem{};
};

// At most this share of a measured profile's peak is possible, since a product can beat the shape that
// measured it. Of other profiles' and of data sheets' peaks at most all is.
inline constexpr double kMostShare = 1.3;
// Returns the shares of a rank that takes `step_s` for the `images` of its step, which `trace` describes.
PeakShare peak_share_of(const StepTrace& trace, const MachineProfile& machine, int64_t images, double step_s);

}  // namespace kiln
