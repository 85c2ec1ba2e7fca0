// Measures a step's seconds by phase, with a clock on a CPU and events on a GPU. It never waits and is cheap
// enough to run always.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <array>
#include <chrono>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/json.h"
#include "step/step_observer.h"

namespace kiln {

using PhaseSeconds = std::array<double, kNumStepPhases>;  // indexed by StepPhase

// Phases before the step, in which pictures and captions of a batch are encoded.
inline constexpr std::array<const char*, 2> kEncodingPhases = {"encoding", "caption encoding"};
using EncodingTimes = std::array<double, kEncodingPhases.size()>;  // seconds
// Returns the seconds of all encoding phases. `phase_s`: seconds by phase name.
double encoding_seconds(const std::map<std::string, double>& phase_s);

// A phase lasts until the next one begins, so the phases of a step add up to its time.
class PhaseTimers : public StepObserver {
 public:
  // On a GPU they time the stream that is current now. What runs beside it counts where it is waited for.
  explicit PhaseTimers(at::Device device);

  void begin(StepPhase phase, int64_t segment) override;
  void end(StepPhase, int64_t) override {}
  // REQUIRES: called after each TrainStep::run().
  void end_step() { switch_to(std::nullopt); }

  // Returns the sums since the last call. Leaves what a GPU has not finished yet to the next call.
  PhaseSeconds take();

 private:
  using Clock = std::chrono::steady_clock;
  struct Mark {
    std::optional<StepPhase> phase;  // begins here; none: the step ends
    c10::Event event;
  };
  void switch_to(std::optional<StepPhase> phase);
  void record_event(std::optional<StepPhase> phase);
  void settle();

  at::Device device_;
  c10::Stream stream_;
  std::optional<StepPhase> phase_;
  Clock::time_point since_{};
  PhaseSeconds seconds_{};
  std::deque<Mark> marks_;          // GPU: marks whose time is not known yet, oldest first
  std::vector<c10::Event> unused_;  // events to reuse
};

// A group of phases as the progress line and the report show it.
struct PhaseGroup {
  const char* name;
  const char* color;                // in plots
  std::vector<const char*> phases;  // their names in log.jsonl's phase_s

  // Returns the group's seconds of a phase_s, by phase name.
  double seconds(const nlohmann::json& phase_s) const;
};
// Returns all groups. Every phase of a step is in one of them.
std::span<const PhaseGroup> phase_groups();

}  // namespace kiln
