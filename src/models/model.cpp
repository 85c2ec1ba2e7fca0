#include "models/model.h"

#include <iterator>
#include <utility>

#include "core/aten.h"
#include "core/error.h"

namespace kiln {

void SkipStack::enter(State& state, const SkipUse& use) {
  if (static_cast<int64_t>(stack_.size()) < use.pops)
    fail("models", "a segment pops {} skips, but the stack holds {}", use.pops, stack_.size());
  const auto first = stack_.end() - use.pops;
  state.skips.assign(std::make_move_iterator(first), std::make_move_iterator(stack_.end()));
  stack_.erase(first, stack_.end());
}

void SkipStack::leave(State& state, const SkipUse& use) {
  if (static_cast<int64_t>(state.skips.size()) != use.pushes)
    fail("models", "a segment pushes {} skips, but announced {}", state.skips.size(), use.pushes);
  for (at::Tensor& skip : std::exchange(state.skips, {})) stack_.push_back(std::move(skip));
}

ParameterList SegmentModel::parameters() const {
  ParameterList all;
  for (const auto& segment : segments_)
    all.insert(all.end(), segment->parameters().begin(), segment->parameters().end());
  return all;
}

at::Tensor SegmentModel::forward(const ModelInput& input) const {
  State state;
  SkipStack skips;
  for (const auto& segment : segments_) {
    skips.enter(state, segment->skips());
    state = segment->forward(state, input);
    skips.leave(state, segment->skips());
  }
  return state.hidden;
}

}  // namespace kiln
