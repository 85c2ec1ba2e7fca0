#include "diffusion/losses.h"

#include "core/aten.h"
#include "core/error.h"

namespace kiln {

at::Tensor mean_per_image(const at::Tensor& values) { return values.flatten(1).mean(1); }

at::Tensor uniform_index(const at::Tensor& u, int64_t count) {
  return (u * static_cast<double>(count)).floor().clamp_max(static_cast<double>(count - 1)).to(at::kLong);
}

void check_channels(std::string_view who, const at::Tensor& prediction, int64_t expected,
                    std::string_view why) {
  if (prediction.dim() != 4 || prediction.size(1) != expected)
    fail(who, "expected a prediction (B, {}, H, W) because {}, got {} channels", expected, why,
         prediction.dim() == 4 ? prediction.size(1) : -1);
}

at::Tensor predicted_channels(std::string_view who, const at::Tensor& prediction, int64_t channels) {
  if (prediction.dim() != 4 || (prediction.size(1) != channels && prediction.size(1) != 2 * channels))
    fail(who, "expected a prediction of {} or {} channels, got {}", channels, 2 * channels,
         prediction.dim() == 4 ? prediction.size(1) : -1);
  return prediction.narrow(1, 0, channels).to(at::kFloat);
}

}  // namespace kiln
