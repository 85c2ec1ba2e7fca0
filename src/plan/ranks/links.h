// Prices collectives: NCCL's between GPUs, Gloo's between the processes of a CPU.
#pragma once
#include "parallel/ranks/collective.h"
#include "plan/price/machine_profile.h"

namespace kiln {

// The links among the ranks of a run.
class Links {
 public:
  // `ranks`: of the whole run, machine.gpus_per_node on each node. REQUIRES: `machine` outlives this.
  Links(const MachineProfile& machine, int64_t ranks) : machine_(&machine), ranks_(ranks) {}

  // Returns the seconds from the beginning of a collective to its end, if all ranks begin at once and no
  // other collective is under way, apart from those of groups like this one, which run at the same time.
  double seconds(const CollectiveObserver::Start& collective) const;

  // False on a CPU: its ranks compute on all of its cores, and what exchanges their tensors runs there too.
  bool are_beside_compute() const { return machine_->device == DryRunDevice::kCuda; }

 private:
  const MachineProfile* machine_;
  int64_t ranks_;
};

}  // namespace kiln
