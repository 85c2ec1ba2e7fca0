// The measured side of plan.json: the memory of steps and of other parts of a run, and the time of steps.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "models/autoencoders/autoencoder.h"
#include "parallel/cpu_share.h"
#include "step/span_recorder.h"
#include "watch/observer_group.h"
#include "watch/phase_timers.h"
#include "watch/prediction.h"

namespace kiln {

// Measures the peak memory of tensors in parts of a run outside the step: load, checkpoint, ...
class PhaseMemory {
 public:
  explicit PhaseMemory(at::Device device) : device_(device) {}

  // A phase lasts while this lives. Phases do not nest. Of several with the same name, the highest peak
  // counts. On a CPU this needs install_tracking_cpu_allocator().
  class Phase {
   public:
    Phase(PhaseMemory& memory, std::string name);
    ~Phase();
    Phase(const Phase&) = delete;

   private:
    PhaseMemory& memory_;
    std::string name_;
  };

  // On a CPU, counts in every phase those of these tensors whose memory is a mapped file's and not the
  // allocator's. REQUIRES: they were there before the first phase, as a text encoder's weights are.
  void count_mapped(const std::vector<at::Tensor>& tensors);

  // Live bytes on the device at the peak of each phase so far, by name.
  std::map<std::string, int64_t> peak_bytes() const;

 private:
  at::Device device_;
  int64_t mapped_bytes_ = 0;
  std::map<std::string, int64_t> peak_bytes_;  // allocated
};

// Measures the time of every step, and memory in the first two. On a CPU it records every allocation (this
// needs install_tracking_cpu_allocator), on a GPU it reads the allocator's peak. The second step counts as
// steady.
class StepMeasurement {
 public:
  // `autoencoder`: the run's loaded one, or null. REQUIRES: it, `state` and `observers` outlive this.
  StepMeasurement(at::Device device, int64_t global_batch, const TrainingState& state,
                  const Autoencoder* autoencoder, ObserverGroup& observers);
  ~StepMeasurement();
  StepMeasurement(const StepMeasurement&) = delete;

  // Calls run(), which takes one step, and measures its memory and phases. Returns the result of run().
  template <class Run>
  auto measure(Run&& run) {
    begin();
    auto result = run();
    end();
    return result;
  }
  // Measures the memory of run(), which rehearses the largest batch before the first step. It then stands for
  // the memory of steps with smaller batches.
  template <class Run>
  void measure_rehearsal(Run&& run) {
    begin();
    run();
    take_memory(kRehearsal);
  }
  // Adds the times of the measured step: the whole step from its batch to all that follows it, the wait for
  // the batch, and the encoding of the batch.
  void add(double step_seconds, double stall_seconds, EncodingTimes encoding_s = {});

  int64_t num_steps() const { return num_steps_; }
  StepFigures figures();

  // Counts these tensors as `kind` if they are on the device. REQUIRES: no step has run.
  void count(const std::vector<at::Tensor>& tensors, MemoryKind kind);

 private:
  void begin();
  void end();
  void take_memory(const std::string& phase);
  std::map<std::string, int64_t> state_bytes() const;

  at::Device device_;
  int64_t global_batch_;
  const TrainingState& state_;
  std::vector<std::pair<at::Tensor, MemoryKind>> beside_;  // tensors beside the state
  ObserverGroup& observers_;
  PhaseTimers timers_;
  std::unique_ptr<SpanRecorder> recorder_;  // set in a step whose memory is measured
  int64_t num_steps_ = 0;
  // Sums over the steady steps. A short run's last step counts as one.
  struct Steady {
    int64_t steps = 0;
    double seconds = 0, stalled_s = 0;
    EncodingTimes encoding_s{};
    PhaseSeconds phase_s{};
  } steady_{};
  std::vector<double> newest_;   // seconds of the newest steady steps, of which number n is at n % kMostKept
  ProcessorTimes steady_begin_;  // before the first of them
  StepFigures memory_;           // only the fields about memory
};

}  // namespace kiln
