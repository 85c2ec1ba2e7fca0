#include "watch/step_measurement.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <set>
#include <utility>

#include "core/allocations.h"
#include "core/aten.h"
#include "parallel/machine.h"

namespace kiln {

namespace {

constexpr int64_t kWarmupSteps = 2;  // not steady: they make buffers, choose kernels and record memory

// Steps whose durations are kept for their quartiles: a run of a million steps takes no more memory than one
// of thousands.
constexpr int64_t kMostKept = 4096;

// Interpolates linearly between the two nearest values.
double quantile(const std::vector<double>& sorted, double share) {
  const double place = share * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(place), above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (place - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

}  // namespace

PhaseMemory::Phase::Phase(PhaseMemory& memory, std::string name) : memory_(memory), name_(std::move(name)) {
  if (memory_.device_.is_cpu())
    reset_peak_cpu_bytes();
  else
    at::accelerator::resetPeakStats(memory_.device_.index());
}

PhaseMemory::Phase::~Phase() {
  const int64_t peak = memory_.device_.is_cpu() ? live_cpu_bytes().peak : peak_device_bytes(memory_.device_);
  if (peak > 0) memory_.peak_bytes_[name_] = std::max(memory_.peak_bytes_[name_], peak);
}

void PhaseMemory::count_mapped(const std::vector<at::Tensor>& tensors) {
  if (!device_.is_cpu()) return;
  for (const at::Tensor& tensor : tensors)
    if (block_id(tensor) == 0) mapped_bytes_ += static_cast<int64_t>(tensor.nbytes());
}

std::map<std::string, int64_t> PhaseMemory::peak_bytes() const {
  std::map<std::string, int64_t> peaks = peak_bytes_;
  for (auto& [phase, bytes] : peaks) bytes += mapped_bytes_;
  return peaks;
}

StepMeasurement::StepMeasurement(at::Device device, int64_t global_batch, const TrainingState& state,
                                 const Autoencoder* autoencoder, ObserverGroup& observers)
    : device_(device), global_batch_(global_batch), state_(state), observers_(observers), timers_(device) {
  if (autoencoder)
    for (const auto& weight : autoencoder->parameters())
      beside_.emplace_back(weight->value, MemoryKind::kAutoencoder);
  observers_.add(&timers_);
}

StepMeasurement::~StepMeasurement() {
  observers_.remove(&timers_);
  if (!recorder_) return;  // an exception ended the step
  observe_cpu_allocations(nullptr);
  observers_.remove(recorder_.get());
}

void StepMeasurement::count(const std::vector<at::Tensor>& tensors, MemoryKind kind) {
  for (const at::Tensor& tensor : tensors) beside_.emplace_back(tensor, kind);
}

void StepMeasurement::begin() {
  if (num_steps_ >= kWarmupSteps) return;
  if (!device_.is_cpu()) {
    at::accelerator::resetPeakStats(device_.index());
    return;
  }
  recorder_ = std::make_unique<SpanRecorder>();
  for (const auto& [tensor, kind] : beside_) {
    recorder_->register_tensor(tensor, kind);
    recorder_->register_mapped(tensor, kind);  // weights used straight from their mapped file
  }
  recorder_->register_state(state_);
  observers_.add(recorder_.get());
  observe_cpu_allocations(recorder_.get());
}

void StepMeasurement::end() {
  timers_.end_step();
  if (num_steps_ < kWarmupSteps) take_memory(num_steps_ == 0 ? "first step" : "steady step");
}

void StepMeasurement::take_memory(const std::string& phase) {
  StepFigures taken;
  if (device_.is_cpu()) {
    observe_cpu_allocations(nullptr);
    observers_.remove(recorder_.get());
    const RecordedStep recorded = std::exchange(recorder_, nullptr)->finish();
    taken.peak_bytes = recorded.memory.peak_bytes;
    for (const auto& [kind, bytes] : recorded.memory.peak_by_kind)
      taken.by_kind[std::string(name_of(kind))] = bytes;
    taken.curve = memory_curve(recorded);
  } else {
    taken.peak_bytes = peak_device_bytes(device_);
    taken.by_kind = state_bytes();
    int64_t rest = taken.peak_bytes;
    for (const auto& [kind, bytes] : taken.by_kind) rest -= bytes;
    taken.by_kind["step"] = rest;  // the allocator does not tell activations and scratch apart
  }
  taken.by_phase = std::move(memory_.by_phase);
  taken.by_phase[phase] = taken.peak_bytes;
  // The plan is of the largest batch. If that was rehearsed, the steps' smaller ones are no measure of it.
  const bool is_smaller = taken.by_phase.contains(kRehearsal) && taken.peak_bytes < memory_.peak_bytes;
  if (is_smaller)
    memory_.by_phase = std::move(taken.by_phase);
  else
    memory_ = std::move(taken);
}

std::map<std::string, int64_t> StepMeasurement::state_bytes() const {
  std::map<std::string, int64_t> by_kind;
  std::set<const void*> seen;
  const auto add = [&](const at::Tensor& tensor, MemoryKind kind) {
    if (tensor.device() != device_) return;
    const void* memory = tensor.storage().data();  // null: whole weights or gradients between their uses
    if (memory && seen.insert(memory).second)
      by_kind[std::string(name_of(kind))] += static_cast<int64_t>(tensor.storage().nbytes());
  };
  visit_state(state_, add);
  for (const auto& [tensor, kind] : beside_) add(tensor, kind);
  return by_kind;
}

void StepMeasurement::add(double step_seconds, double stall_seconds, EncodingTimes encoding_s) {
  if (++num_steps_ == kWarmupSteps) steady_begin_ = processor_times();
  if (num_steps_ <= kWarmupSteps + 1) {
    steady_ = {};
    newest_.clear();
  }
  if (steady_.steps < kMostKept) newest_.push_back(0);
  newest_[static_cast<size_t>(steady_.steps % kMostKept)] = step_seconds;
  ++steady_.steps;
  steady_.seconds += step_seconds;
  steady_.stalled_s += stall_seconds;
  for (size_t kind = 0; kind < encoding_s.size(); ++kind) steady_.encoding_s[kind] += encoding_s[kind];
  const PhaseSeconds seconds = timers_.take();
  for (size_t i = 0; i < seconds.size(); ++i) steady_.phase_s[i] += seconds[i];
}

StepFigures StepMeasurement::figures() {
  StepFigures figures = memory_;
  if (num_steps_ == 0) return figures;
  const double steps = static_cast<double>(steady_.steps);
  std::vector<double> sorted = newest_;
  std::ranges::sort(sorted);
  figures.step_s_quartiles = {quantile(sorted, 0.25), quantile(sorted, 0.5), quantile(sorted, 0.75)};
  figures.step_s = figures.step_s_quartiles[1];
  figures.images_per_s = static_cast<double>(global_batch_) / figures.step_s;
  figures.stall_share = steady_.stalled_s / steady_.seconds;
  figures.num_steps = steady_.steps;
  if (device_.is_cpu() && num_steps_ > kWarmupSteps)
    figures.taken_share =
        taken_share(processor_times().since(steady_begin_), processors_of(at::get_num_threads()));
  // The shares of all steps, of the median one: phases of a busy machine's slow steps would sum to more than
  // it.
  for (size_t i = 0; i < steady_.phase_s.size(); ++i)
    figures.phase_s[std::string(name_of(static_cast<StepPhase>(i)))] =
        steady_.phase_s[i] / steady_.seconds * figures.step_s;
  figures.phase_s["data"] = steady_.stalled_s / steps;
  for (size_t kind = 0; kind < steady_.encoding_s.size(); ++kind)
    if (steady_.encoding_s[kind] > 0)
      figures.phase_s[kEncodingPhases[kind]] = steady_.encoding_s[kind] / steps;
  return figures;
}

}  // namespace kiln
