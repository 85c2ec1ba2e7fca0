#include "watch/profiler.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <cstdlib>
#include <filesystem>
#include <optional>

#include "core/error.h"
#include "core/files/atomic_file.h"

namespace kiln {

namespace torch_profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

// An open slice is a RecordFunction: the profiler records its begin and its end.
struct StepProfiler::Slices {
  std::optional<at::RecordFunction> step, phase;
  static void open(std::optional<at::RecordFunction>& slice, const std::string& name) {
    slice.emplace(at::RecordScope::USER_SCOPE);
    if (slice->isActive()) slice->before(name);
  }
};

StepProfiler::StepProfiler(Options options) : options_(std::move(options)) {}

StepProfiler::~StepProfiler() {
  if (!slices_) return;  // an exception ended training inside the range
  slices_->phase.reset();
  slices_->step.reset();
  torch_profiler::disableProfiler();
}

void StepProfiler::start() {
  std::set<ActivityType> activities{ActivityType::CPU};
  if (options_.device.is_cuda())
    activities.insert(ActivityType::CUDA);
  else
    ::setenv("KINETO_LOG_LEVEL", "4", /*overwrite=*/0);  // Kineto complains if there is no GPU
  const torch_profiler::ProfilerConfig config(torch_profiler::ProfilerState::KINETO,
                                              /*report_input_shapes=*/true);
  torch_profiler::prepareProfiler(config, activities);
  torch_profiler::enableProfiler(
      config, activities,
      {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE});
  slices_ = std::make_unique<Slices>();
}

void StepProfiler::begin_step(int64_t step) {
  if (finished_ || step < options_.steps.first || step > options_.steps.last) return;
  if (!slices_) start();
  Slices::open(slices_->step, fmt::format("step {}", step));
}

void StepProfiler::end_step(int64_t step) {
  if (!slices_) return;
  slices_->step.reset();
  if (step >= options_.steps.last) finish();
}

void StepProfiler::finish() {
  if (!slices_) return;
  slices_.reset();
  finished_ = true;
  if (options_.device.is_cuda())
    at::accelerator::synchronizeDevice(options_.device.index());  // kernels of the last step
  const auto result = torch_profiler::disableProfiler();
  PartialPath part("profile", options_.path, PartialPath::Kind::kFile);
  result->save(part.partial());
  if (std::filesystem::is_empty(part.partial())) fail("profile", "cannot write {}", options_.path);
  part.commit();
}

void StepProfiler::begin(StepPhase phase, int64_t segment) {
  if (!slices_ || !slices_->step) return;
  Slices::open(slices_->phase, segment < 0 ? std::string(name_of(phase))
                                           : fmt::format("{} {}", name_of(phase),
                                                         options_.segments[static_cast<size_t>(segment)]));
}

void StepProfiler::end(StepPhase, int64_t) {
  if (slices_) slices_->phase.reset();
}

}  // namespace kiln
