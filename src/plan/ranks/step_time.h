// Prices collectives (NCCL's between GPUs, Gloo's between the processes of a CPU), and with them the
// operations of a trace: the time that one rank of several takes. Only links, the host's update and a disk
// have formulas here.
#pragma once
#include <array>

#include "parallel/ranks/collective.h"
#include "plan/price/machine_profile.h"
#include "plan/ranks/rank_step.h"

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

// The time of one step on a rank.
struct StepTime {
  double seconds = 0;
  std::array<double, kNumStepPhases> by_phase{};  // communication is what nothing hides
  double communication_s = 0;                     // time that the links are busy, hidden or not
  double host_s = 0;  // time of an offloaded optimizer: transfers and the host's update
};
// Returns the time of a steady step. Collectives begin and are waited for where the real step does so, and
// the weights that the step before sent arrive during this one. REQUIRES: the trace is of as many ranks, in
// all and per node, at the same stage. It may have the optimizer elsewhere.
StepTime time_step(const StepTrace& trace, const MachineProfile& machine, const Sharding& sharding);

}  // namespace kiln
