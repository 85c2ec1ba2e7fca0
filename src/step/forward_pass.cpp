#include "step/forward_pass.h"

#include "core/aten.h"

namespace kiln {

at::Tensor forward_pass(const Denoiser& denoiser, Zero& zero, const ModelInput& input) {
  const at::NoGradGuard no_grad;
  const auto& segments = denoiser.segments();
  State state;
  SkipStack skips;
  for (size_t i = 0; i < segments.size(); ++i) {
    zero.gather(i, 1);
    skips.enter(state, segments[i]->skips());
    state = segments[i]->forward(state, input);
    skips.leave(state, segments[i]->skips());
    zero.release(i);
  }
  return state.hidden;
}

}  // namespace kiln
