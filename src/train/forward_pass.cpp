#include "train/forward_pass.h"

#include "core/aten.h"

namespace kiln {

at::Tensor forward_pass(const Denoiser& denoiser, Zero& zero, const DenoiserInput& input) {
  const at::NoGradGuard no_grad;
  const auto& segments = denoiser.segments();
  State state;
  for (size_t i = 0; i < segments.size(); ++i) {
    zero.gather(i, 1);
    state = segments[i]->forward(state, input);
    zero.release(i);
  }
  return state.hidden;
}

}  // namespace kiln
