// Seconds of a step by phase, cheap enough to run always: a clock on a CPU, events on a GPU, never a wait.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <array>
#include <chrono>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "step/step_observer.h"

namespace kiln {

using PhaseSeconds = std::array<double, kNumStepPhases>;  // indexed by StepPhase

// What a batch is made of is encoded before the step, outside of its phases: pictures, captions.
inline constexpr std::array<const char*, 2> kEncodingPhases = {"encoding", "caption encoding"};
using EncodingTimes = std::array<double, kEncodingPhases.size()>;  // seconds
// The seconds of all encoding phases together; `phase_s` has the seconds of each phase by name.
double encoding_seconds(const std::map<std::string, double>& phase_s);

// A phase lasts until the next one begins, so that the phases of a step add up to its time.
class PhaseTimers : public StepObserver {
 public:
  explicit PhaseTimers(at::Device device) : device_(device) {}

  void begin(StepPhase phase, int64_t segment) override;
  void end(StepPhase, int64_t) override {}
  // REQUIRES: called after each TrainStep::run().
  void end_step() { switch_to(std::nullopt); }

  // Sums since the last call. On a GPU what it has not finished yet is left for the next one.
  PhaseSeconds take();

 private:
  using Clock = std::chrono::steady_clock;
  struct Mark {
    std::optional<StepPhase> phase;  // that begins here
    c10::Event event;
  };
  void switch_to(std::optional<StepPhase> phase);
  void record_event(std::optional<StepPhase> phase);
  void settle();

  at::Device device_;
  std::optional<StepPhase> phase_;
  Clock::time_point since_{};
  PhaseSeconds seconds_{};
  std::deque<Mark> marks_;          // GPU: oldest first, those whose time is not known yet
  std::vector<c10::Event> unused_;  // events are made once
};

// Phases of a step as people read them, in the progress line and in the report.
struct PhaseGroup {
  const char* name;
  const char* color;                // in plots
  std::vector<const char*> phases;  // their names in log.jsonl's phase_s

  // The group's part of a step's or a line's phase_s.
  double seconds(const nlohmann::json& phase_s) const;
};
// Every phase of a step is in one of them.
std::span<const PhaseGroup> phase_groups();

}  // namespace kiln
