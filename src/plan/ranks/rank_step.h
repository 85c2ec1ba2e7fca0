// The step of one of several ranks, composed from the trace of one rank that keeps everything. What the model
// does is the same, and every call on the training state is made again on the state of the other rank.
#pragma once
#include <memory>

#include "plan/price/machine_profile.h"
#include "plan/trace/trace.h"
#include "step/rank_work.h"

namespace kiln {

// How the state of a planned run is divided among its ranks.
struct Sharding {
  int64_t gpus = 1;
  int64_t zero_stage = 0;  // divides 1: optimizer state and averages, 2: gradients too, 3: weights too
  StatePlacement offload{};
  int64_t ranks_per_node = 0;  // ranks that divide the state, each node with a copy; 0: all ranks
};
Sharding sharding_of(const TrainOptions& options, int64_t gpus, const MachineProfile& machine);
// Throws Error if the number of GPUs or the stage is out of range.
void validate(const Sharding& sharding);

// True if the trace is of such a rank. If not, trace_of_rank() makes one that is.
bool is_of(const StepTrace& trace, const Sharding& sharding);

// The training state of rank 0 of several ranks, without memory, and what steps do on it.
class RankStep {
 public:
  // `like`: a trace of the same model with as many passes, on any ranks.
  RankStep(const StepTrace& like, const Sharding& sharding);

  // Returns what trace_step() would return for this rank, without its part of a checkpoint. REQUIRES: both
  // stages are below 2, or neither is, or there is one pass. From stage 2 on every pass writes its gradients;
  // below it, passes add to them.
  StepTrace trace(const StepTrace& source);
  // Fills in that part.
  void add_checkpoint_part(StepTrace& trace) const;

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

// Returns the trace of rank 0 of `sharding`: composed from `trace` if RankStep can, else traced. What is
// asked for its time or its peak needs no part of a checkpoint.
StepTrace trace_of_rank(const StepTrace& trace, const Sharding& sharding, bool has_checkpoint_part = true);

// Makes the trace of a rank that keeps the whole state and has others one among another number of ranks: only
// who takes part in its collectives changes. Returns false and changes nothing where `sharding` asks for
// more.
bool change_num_ranks(StepTrace& trace, const Sharding& sharding);

}  // namespace kiln
