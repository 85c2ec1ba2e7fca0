// --profile FROM:TO: writes a Chrome trace of those steps with torch's own profiler. The step's phases are
// its outer slices.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "run/train_options.h"
#include "step/step_observer.h"

namespace kiln {

class StepProfiler : public StepObserver {
 public:
  struct Options {
    StepRange steps;
    std::string path;  // the trace file
    at::Device device = at::kCPU;
    std::vector<std::string> segments;  // names in the slices
  };
  explicit StepProfiler(Options options);
  ~StepProfiler() override;

  // REQUIRES: called around each step, with its 1-based number. Writes the trace after the last step of the
  // range. Throws Error if that fails.
  void begin_step(int64_t step);
  void end_step(int64_t step);
  // Writes the trace so far. Call it when training ends inside the range.
  void finish();
  bool finished() const { return finished_; }

  void begin(StepPhase phase, int64_t segment) override;
  void end(StepPhase phase, int64_t segment) override;

 private:
  struct Slices;
  void start();

  Options options_;
  std::unique_ptr<Slices> slices_;  // while it records
  bool finished_ = false;
};

}  // namespace kiln
