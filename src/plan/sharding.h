// What one rank of several holds, sends and waits for: derived from the flat units of a single rank's trace
// and the volumes of the collectives (docs/planning.md lists the assumptions). The only place in plan/ where
// a formula stands instead of the trace.
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
  int64_t transient_bytes = 0;           // the most of whole weights or gradients of single segments at once
  int64_t pinned_bytes = 0, nvme_bytes = 0;

  int64_t device_bytes() const;  // sum of `device`
};
RankState shard_state(const StepTrace& trace, const Sharding& sharding);

// Elements of a unit of `elements` that one rank keeps.
int64_t shard_elements(int64_t elements, int64_t gpus);

// One step in time, on a rank.
struct StepTime {
  double seconds = 0;
  std::array<double, kNumStepPhases> by_phase{};  // communication: what nothing hides
  double communication_s = 0;                     // that the links are busy, hidden or not
  double host_s = 0;  // of an offloaded optimizer: transfers and the host's update
};
// Gradient reduction of a segment runs beside the backward of the next; stage 3 gathers one segment ahead.
StepTime time_step(const StepTrace& trace, const MachineProfile& machine, const Sharding& sharding);

}  // namespace kiln
