#include "models/model.h"

#include "core/aten.h"

namespace kiln {

ParameterList Denoiser::parameters() const {
  ParameterList all;
  for (const auto& segment : segments_)
    all.insert(all.end(), segment->parameters().begin(), segment->parameters().end());
  return all;
}

at::Tensor Denoiser::forward(const DenoiserInput& input) const {
  State state;
  for (const auto& segment : segments_) state = segment->forward(state, input);
  return state.hidden;
}

}  // namespace kiln
