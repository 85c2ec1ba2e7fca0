// The step of one of several ranks, composed of the trace of one rank that keeps everything: what the model
// does is the same, and every call on the training state is made again on that of the other rank.
#pragma once
#include <memory>

#include "plan/ranks/sharding.h"
#include "step/rank_work.h"

namespace kiln {

// The training state of rank 0 of some ranks, without memory, and what steps do on it.
class RankStep {
 public:
  // `like`: a trace of the same model and of as many passes, on any ranks.
  RankStep(const StepTrace& like, const Sharding& sharding);

  // What trace_step() says of this rank. REQUIRES: both stages are below 2, or neither is, or there is one
  // pass: from stage 2 on gradients are written in every pass, before it they are added to.
  StepTrace trace(const StepTrace& source);

  int64_t persistent_bytes() const;

 private:
  DryRunDevice device_;
  TrainOptions options_;
  int64_t ranks_per_node_;
  std::shared_ptr<ProcessGroup> group_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Denoiser> outline_;
  std::unique_ptr<TrainingState> state_;
  std::unique_ptr<RankWork> work_;
  std::vector<CollectiveEvent> under_way_;
  StepTrace described_;  // what a trace says of the state, which no step changes
};

// The trace of rank 0 of `sharding`: composed where `trace` tells of it, traced where not.
StepTrace trace_of_rank(const StepTrace& trace, const Sharding& sharding);

}  // namespace kiln
