// What one rank of several holds, sends and waits for, on any number of ranks and at any stage. A trace of as
// many ranks says so itself (plan/trace.h); from another one the real flat units and their ZeRO are walked
// again, without the model. Formulas stand here only for prices: links, the host's update, a disk.
#pragma once
#include <array>
#include <map>
#include <string>
#include <vector>

#include "plan/machine_profile.h"
#include "plan/trace.h"

namespace kiln {

struct Sharding {
  int64_t gpus = 1;
  int64_t zero_stage = 0;  // 1: optimizer state and averages, 2: gradients too, 3: weights too
  std::string offload_optimizer = "none";  // none, cpu, nvme: where master, moments and averages live
};
// Throws Error: a stage without ranks, unknown values.
void validate(const Sharding& sharding);

// Training state of one rank, in bytes.
struct RankState {
  std::map<MemoryKind, int64_t> device;  // persistent, by kind
  // The most of whole weights and gradients of single segments at once, where the trace is of one rank; else
  // they are in the trace.
  int64_t transient_bytes = 0;
  int64_t pinned_bytes = 0, nvme_bytes = 0;

  int64_t device_bytes() const;  // sum of `device`
};
RankState shard_state(const StepTrace& trace, const Sharding& sharding);

// One step in time, on a rank.
struct StepTime {
  double seconds = 0;
  std::array<double, kNumStepPhases> by_phase{};  // communication: what nothing hides
  double communication_s = 0;                     // that the links are busy, hidden or not
  double host_s = 0;  // of an offloaded optimizer: transfers and the host's update
};
// Collectives begin and are waited for where the real step does it, in a steady step: the weights that the
// step before sent arrive during this one.
StepTime time_step(const StepTrace& trace, const MachineProfile& machine, const Sharding& sharding);

}  // namespace kiln
