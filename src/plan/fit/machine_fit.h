// The plan of a run on the machine that it is to start on, counted as that machine's memory is counted, and
// the memory choices that fit a budget there.
#pragma once
#include <optional>

#include "plan/fit/process_memory.h"
#include "plan/run/plan.h"

namespace kiln {

struct FittedChoice {
  TrainOptions options;
  Plan plan;
};

class MachineFit {
 public:
  // Plans for each of `world_size` ranks. `process`: this one; nothing on a GPU. REQUIRES: `machine` outlives
  // this.
  MachineFit(const MachineProfile& machine, const ProcessMemory& process, int64_t budget_bytes,
             int64_t world_size)
      : machine_(&machine), process_(process), budget_(budget_bytes), world_size_(world_size) {}

  // The plan of the ranks with the most rows.
  Plan plan(TrainOptions options) const;

  // What the device, on a CPU the process, comes to hold.
  int64_t needed(const Plan& plan) const;

  // The fewest recomputed FLOPs within the budget; nothing when no choice fits.
  std::optional<FittedChoice> choose(TrainOptions options) const;

  // The same with the micro-batch chosen, too: halves of the rank's rows, the fastest step that fits.
  std::optional<FittedChoice> choose_micro_batch(TrainOptions options) const;

  // The largest micro-batch that fits, without a copy of the state where that does not; nothing when none
  // does.
  std::optional<TrainOptions> nearest(const TrainOptions& options) const;

  // The same with the optimizer's state further away than it is: on a GPU in host memory, else on a disk.
  std::optional<TrainOptions> nearest_offloaded(const TrainOptions& options) const;

  // What the smallest pass of these options needs: one image, with as much recomputed as helps.
  int64_t least(TrainOptions options) const;

 private:
  int64_t rows_of_rank(const TrainOptions& options) const;

  const MachineProfile* machine_;
  ProcessMemory process_;
  int64_t budget_, world_size_;
};

}  // namespace kiln
