#include "watch/phase_timers.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace kiln {

PhaseTimers::PhaseTimers(at::Device device)
    : device_(device), stream_(c10::impl::VirtualGuardImpl(device.type()).getStream(device)) {}

void PhaseTimers::begin(StepPhase phase, int64_t) {
  if (phase_ != phase) switch_to(phase);
}

void PhaseTimers::switch_to(std::optional<StepPhase> phase) {
  if (device_.is_cpu()) {
    const auto now = Clock::now();
    if (phase_) seconds_[static_cast<size_t>(*phase_)] += std::chrono::duration<double>(now - since_).count();
    since_ = now;
  } else {
    record_event(phase);
    if (!phase) settle();
  }
  phase_ = phase;
}

void PhaseTimers::record_event(std::optional<StepPhase> phase) {
  if (unused_.empty()) unused_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // with timing
  c10::Event event = std::move(unused_.back());
  unused_.pop_back();
  event.record(stream_);
  marks_.push_back({phase, std::move(event)});
}

// Reads the intervals that the GPU has finished.
void PhaseTimers::settle() {
  constexpr double kSecondsPerMillisecond = 1e-3;
  while (marks_.size() >= 2 && marks_[1].event.query()) {
    if (const auto phase = marks_[0].phase)
      seconds_[static_cast<size_t>(*phase)] +=
          marks_[0].event.elapsedTime(marks_[1].event) * kSecondsPerMillisecond;
    unused_.push_back(std::move(marks_[0].event));
    marks_.pop_front();
  }
}

PhaseSeconds PhaseTimers::take() {
  if (!device_.is_cpu()) settle();
  return std::exchange(seconds_, {});
}

double encoding_seconds(const std::map<std::string, double>& phase_s) {
  double sum = 0;
  for (const char* phase : kEncodingPhases)
    if (const auto found = phase_s.find(phase); found != phase_s.end()) sum += found->second;
  return sum;
}

double PhaseGroup::seconds(const nlohmann::json& phase_s) const {
  double sum = 0;
  for (const char* phase : phases) sum += phase_s.value(phase, 0.0);
  return sum;
}

std::span<const PhaseGroup> phase_groups() {
  static const std::vector<PhaseGroup> kGroups = {
      {"data", "#94a3b8", {"data"}},
      {"encoding", "#ef4444", {kEncodingPhases[0], kEncodingPhases[1]}},
      {"forward", "#2563eb", {"input", "forward", "loss"}},
      {"recompute", "#8b5cf6", {"recompute"}},
      {"backward", "#0ea5e9", {"backward"}},
      {"graph", "#0d9488", {"graph"}},
      {"optimizer", "#10b981", {"grad_norm", "optimizer"}},
      {"offload", "#d946ef", {"offload"}},
      {"communication", "#f59e0b", {"communication"}}};
  return kGroups;
}

}  // namespace kiln
