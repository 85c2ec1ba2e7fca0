// What the device of one rank holds in each phase of a run: the trace of the step, and of what is outside of
// it, played one after another.
#pragma once
#include <optional>

#include "plan/device_memory.h"
#include "plan/phases.h"
#include "plan/plan.h"
#include "plan/planned_data.h"

namespace kiln {

struct PhasePeaks {
  DeviceTimeline::Peak load, first, steady, validation, sampling, encoding;
  bool out_of_memory = false;

  int64_t reserved_bytes() const;  // the most of all
  int64_t live_bytes() const;
};

class PhasePlayer {
 public:
  // Reads options, machine and data of `plan`. REQUIRES: both outlive this.
  PhasePlayer(const Plan& plan, const StepTrace& trace);

  // The allocator gives back what it has cached before it runs out: a run fits when its allocations can all
  // be served within `memory_bytes`, however much more they would reserve where there is more. Of one that
  // does not fit: what it takes in the least memory that would do.
  PhasePeaks play_within(int64_t memory_bytes) const;

  int64_t left_by_load() const { return left_bytes(load_); }                   // training state, tables
  int64_t autoencoder_bytes() const { return left_bytes(autoencoder_.load); }  // of its weights
  const std::optional<PlannedAutoencoder>& autoencoder() const { return planned_autoencoder_; }
  bool validates() const;
  bool draws_samples() const;

 private:
  const TrainOptions& options() const { return plan_.options.train; }
  PhasePeaks play(int64_t capacity_bytes) const;

  const Plan& plan_;
  const StepTrace& trace_;
  const bool cuda_;
  const std::optional<PlannedAutoencoder> planned_autoencoder_;
  DeviceEvents load_, validation_, sampling_;
  AutoencoderEvents autoencoder_;
};

}  // namespace kiln
