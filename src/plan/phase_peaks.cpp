#include "plan/phase_peaks.h"

#include <algorithm>

namespace kiln {

int64_t PhasePeaks::reserved_bytes() const {
  return std::max({load.reserved_bytes, first.reserved_bytes, steady.reserved_bytes,
                   validation.reserved_bytes, sampling.reserved_bytes, encoding.reserved_bytes});
}

int64_t PhasePeaks::live_bytes() const {
  return std::max({load.live_bytes, first.live_bytes, steady.live_bytes, validation.live_bytes,
                   sampling.live_bytes, encoding.live_bytes});
}

PhasePlayer::PhasePlayer(const Plan& plan, const StepTrace& trace)
    : plan_(plan),
      trace_(trace),
      cuda_(plan.machine.device == DryRunDevice::kCuda),
      planned_autoencoder_(planned_autoencoder(plan.options.train, plan.data)) {
  const DryRunDevice device = plan.machine.device;
  const Sharding sharding = sharding_of(options(), plan.options.gpus, plan.machine);
  const auto group = dry_group(sharding.gpus, sharding.ranks_per_node);
  load_ = trace_load(options(), plan.data, device, group);
  // Tables of the objective, made at the first step, stay.
  const int64_t tables = trace.memory.persistent_bytes - left_bytes(load_);
  if (tables > 0) load_.push_back({.id = (uint64_t{1} << 47), .bytes = tables});
  if (validates()) validation_ = trace_validation(options(), plan.data, device, group);
  if (draws_samples()) sampling_ = trace_sample_grid(options(), plan.data, device, group);
  if (planned_autoencoder_)
    autoencoder_ =
        trace_autoencoder(planned_autoencoder_->config, options(), plan.data, device, sharding.gpus);
}

bool PhasePlayer::validates() const { return !options().validation_data.empty(); }
bool PhasePlayer::draws_samples() const { return options().sample_every > 0; }

PhasePeaks PhasePlayer::play(int64_t capacity_bytes) const {
  DeviceTimeline timeline(cuda_, capacity_bytes);
  PhasePeaks peaks;
  const DeviceTimeline::Peak autoencoder = timeline.play(autoencoder_.load);
  peaks.load = timeline.play(load_);
  peaks.load.live_bytes = std::max(peaks.load.live_bytes, autoencoder.live_bytes);
  if (encodes_images(options())) peaks.encoding = timeline.play(autoencoder_.encode);
  timeline.play({{.id = 0, .bytes = plan_.machine.workspace_bytes}});
  peaks.first = timeline.play_step(trace_.memory.events);
  peaks.steady = timeline.play_step(trace_.memory.events);
  const auto play_both = [&](const DeviceEvents& first, const DeviceEvents& second) {
    DeviceTimeline::Peak both = timeline.play(first);
    const DeviceTimeline::Peak then = timeline.play(second);
    both.live_bytes = std::max(both.live_bytes, then.live_bytes);
    both.reserved_bytes = std::max(both.reserved_bytes, then.reserved_bytes);
    return both;
  };
  if (validates())
    peaks.validation =
        play_both(encodes_validation_images(options()) ? autoencoder_.encode : DeviceEvents(), validation_);
  if (draws_samples()) peaks.sampling = play_both(sampling_, autoencoder_.decode);
  peaks.out_of_memory = timeline.out_of_memory();
  return peaks;
}

PhasePeaks PhasePlayer::play_within(int64_t memory_bytes) const {
  const PhasePeaks ample = play(/*capacity_bytes=*/0);
  if (!cuda_ || ample.reserved_bytes() <= memory_bytes) return ample;
  constexpr int64_t kPrecision = 16 << 20;
  int64_t too_little = ample.live_bytes() - 1, enough = ample.reserved_bytes();
  PhasePeaks least = ample;
  const auto try_with = [&](int64_t capacity) {
    const PhasePeaks peaks = play(capacity);
    if (peaks.out_of_memory) {
      too_little = std::max(too_little, capacity);
    } else {
      enough = capacity;
      least = peaks;
    }
    return !peaks.out_of_memory;
  };
  if (memory_bytes > too_little && try_with(memory_bytes)) return least;
  while (enough - too_little > kPrecision) try_with(too_little + (enough - too_little) / 2);
  return least;
}

}  // namespace kiln
