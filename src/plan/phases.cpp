#include "plan/phases.h"

#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "core/allocations.h"
#include "core/aten.h"
#include "core/tensors.h"
#include "diffusion/sampler.h"
#include "plan/planned_data.h"
#include "plan/trace.h"
#include "sample/sampler_loop.h"
#include "train/average_in_place.h"
#include "train/sample_grid.h"
#include "train/validation.h"

namespace kiln {

namespace {

constexpr int64_t kTracedSamplingSteps = 2;  // the second has the history that multistep samplers keep

class EventLog : public AllocationObserver {
 public:
  void allocated(uint64_t id, size_t bytes) override {
    events.push_back({.id = id, .bytes = static_cast<int64_t>(bytes)});
  }
  void freed(uint64_t id, size_t bytes) override {
    events.push_back({.id = id, .bytes = -static_cast<int64_t>(bytes)});
  }
  DeviceEvents events;
};

// What `work` allocates and frees.
template <class Work>
DeviceEvents logged(const Work& work) {
  EventLog log;
  const MetaAllocationScope scope(log);
  work();
  return log.events;
}

int64_t samples_at_once(const TrainOptions& options, int64_t world_size) {
  return std::min((options.num_samples + world_size - 1) / world_size, SampleOptions().batch);
}

// LibTorch without Python has no convolution on meta. Backends without their own end here: two spatial
// dimensions, no transposition, which is what autoencoders have.
at::Tensor convolution_on_meta(const at::Tensor& input, const at::Tensor& weight,
                               const std::optional<at::Tensor>&, at::IntArrayRef stride,
                               at::IntArrayRef padding, at::IntArrayRef dilation, bool, at::IntArrayRef,
                               int64_t) {
  std::vector<int64_t> shape = {input.size(0), weight.size(0)};
  for (int64_t d = 0; d < 2; ++d) {
    const int64_t reach = dilation[d] * (weight.size(d + 2) - 1) + 1;
    shape.push_back((input.size(d + 2) + 2 * padding[d] - reach) / stride[d] + 1);
  }
  const auto channels_last = at::MemoryFormat::ChannelsLast;
  const bool is_channels_last =
      input.suggest_memory_format() == channels_last || weight.suggest_memory_format() == channels_last;
  return at::empty(shape, input.options(), is_channels_last ? channels_last : at::MemoryFormat::Contiguous);
}

at::Tensor safe_softmax_on_meta(const at::Tensor& input, int64_t, std::optional<at::ScalarType> dtype) {
  return at::empty_like(input, input.options().dtype(dtype.value_or(input.scalar_type())));
}

TORCH_LIBRARY_IMPL(aten, Meta, library) {
  library.impl("convolution_overrideable", convolution_on_meta);
  library.impl("_safe_softmax", safe_softmax_on_meta);
}

at::Tensor on_meta(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  return at::empty(shape, at::TensorOptions(at::kMeta).dtype(dtype));
}

}  // namespace

DeviceEvents trace_load(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                        const std::shared_ptr<ProcessGroup>& group) {
  const DryRunScope dry_run(device);
  Training training;  // outlives the log: its state stays
  return logged([&] { training = build_training(options, data, at::kMeta, group); });
}

DeviceEvents trace_sample_grid(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                               const std::shared_ptr<ProcessGroup>& group) {
  const DryRunScope dry_run(device);
  const at::NoGradGuard no_grad;
  TrainOptions two_steps = options;
  two_steps.num_sampling_steps = std::min(options.num_sampling_steps, kTracedSamplingSteps);
  const auto sampler = make_sampler(grid_sampler_config(two_steps, objective_config_of(options)));
  const Training training = build_training(options, data, at::kMeta, group);
  return logged([&] {
    const DenoiserShape& shape = training.denoiser->shape();
    const int64_t batch = samples_at_once(options, group->world_size());
    const at::Tensor labels = shape.num_classes > 0 ? on_meta({batch}, at::kLong) : at::Tensor();
    const DenoiseFn denoise =
        guided_denoiser(*training.denoiser, labels, shape.has_null_class ? options.cfg_scale : 1,
                        CfgConvention::kAuto, forward_of(training));
    const std::vector<int64_t> image_shape = {batch, data.channels, data.height, data.width};
    with_first_ema(*training.state, [&] {
      run_sampler(*sampler, on_meta(image_shape), denoise, [&](int64_t) { return on_meta(image_shape); });
    });
  });
}

DeviceEvents trace_validation(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                              const std::shared_ptr<ProcessGroup>& group) {
  const DryRunScope dry_run(device);
  const at::NoGradGuard no_grad;
  const Training training = build_training(options, data, at::kMeta, group);
  const auto batch_of = [&](int64_t rows) {
    const std::vector<int64_t> shape = {rows, data.channels, data.height, data.width};
    return StepBatch{.x_0 = on_meta(shape),
                     .noise = on_meta(shape),
                     .timesteps = training.objective->timesteps(on_meta({rows}, at::kDouble)),
                     .class_labels = data.num_classes > 0 ? on_meta({rows}, at::kLong) : at::Tensor()};
  };
  forward_losses(training, batch_of(1));  // the objective's tables are made, which stay
  // On a CPU the loader's arrays are read where they are.
  std::optional<StepBatch> batch;
  const int64_t rows = rows_of_validation(options, group->world_size());
  if (device == DryRunDevice::kCpu) batch = batch_of(rows);
  return logged([&] {
    with_first_ema(*training.state, [&] { forward_losses(training, batch ? *batch : batch_of(rows)); });
  });
}

AutoencoderEvents trace_autoencoder(const AutoencoderKlConfig& config, const TrainOptions& options,
                                    const DataShape& data, DryRunDevice device, int64_t world_size) {
  const DryRunScope dry_run(device);
  const at::NoGradGuard no_grad;
  AutoencoderEvents events;
  std::unique_ptr<AutoencoderKl> autoencoder;
  events.load = logged([&] {
    autoencoder = std::make_unique<AutoencoderKl>(
        config,
        BuildOptions{.device = at::kMeta, .compute_dtype = parse_compute_dtype(options.compute_dtype)});
    autoencoder->freeze_weights();
  });
  events.decode = logged([&] {
    const int64_t batch = samples_at_once(options, world_size);
    autoencoder->decode(on_meta({batch, data.channels, data.height, data.width}));
  });
  const int64_t rows =
      encodes_images(options) ? rows_of_walk(options, world_size) : rows_of_validation(options, world_size);
  const std::vector<int64_t> image_shape = {rows, 3, options.image_size, options.image_size};
  // On a CPU the loader's arrays are read where they are.
  std::optional<at::Tensor> images;
  if (device == DryRunDevice::kCpu) images = on_meta(image_shape);
  events.encode = logged([&] { autoencoder->encode(images ? *images : on_meta(image_shape)); });
  return events;
}

int64_t peak_bytes(const DeviceEvents& events) {
  int64_t live = 0, peak = 0;
  for (const DeviceEvent& event : events) peak = std::max(peak, live += event.bytes);
  return peak;
}

int64_t left_bytes(const DeviceEvents& events) {
  int64_t live = 0;
  for (const DeviceEvent& event : events) live += event.bytes;
  return live;
}

}  // namespace kiln
