#include "plan/trace/phases.h"

#include <algorithm>
#include <optional>

#include "core/allocations.h"
#include "core/aten.h"
#include "core/tensors.h"
#include "diffusion/sampler.h"
#include "ops/op_recorder.h"
#include "ops/ops.h"
#include "plan/trace/trace.h"
#include "sample/sampler_loop.h"
#include "step/forward_pass.h"
#include "train/encoding/encoded_captions.h"
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
  MemoryEvents events;
};

int64_t samples_at_once(const TrainOptions& options, int64_t world_size) {
  return std::min((options.samples.num_samples + world_size - 1) / world_size, SampleOptions().batch);
}

at::Tensor on_meta(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  return at::empty(shape, at::TensorOptions(at::kMeta).dtype(dtype));
}

// Returns the pictures that the largest lane's latents are made of.
at::Tensor pictures_on_meta(const Autoencoder& autoencoder, const DataShape& data, int64_t rows) {
  const Lane& lane = data.largest();
  return on_meta({rows, 3, lane.height * autoencoder.downsample, lane.width * autoencoder.downsample});
}

// Neither a validation nor a grid draws what options of training add to a batch.
BatchTensors batch_on_meta(const DataShape& data, int64_t rows) {
  return dry_batch(BatchOptions(), data, rows,
                   [](const HostArray& array, at::ScalarType dtype) { return on_meta(array.sizes, dtype); });
}

}  // namespace

MemoryEvents logged_on_meta(const std::function<void()>& work) {
  EventLog log;
  const MetaAllocationScope scope(log);
  work();
  return log.events;
}

MemoryEvents trace_load(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                        const std::shared_ptr<ProcessGroup>& group) {
  const DryRunScope dry_run(device);
  Training training;  // outlives the log: its state stays
  return logged_on_meta([&] { training = build_training(options, data, at::kMeta, group); });
}

MemoryEvents trace_sample_grid(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                               const std::shared_ptr<ProcessGroup>& group) {
  const DryRunScope dry_run(device);
  const at::NoGradGuard no_grad;
  TrainOptions two_steps = options;
  two_steps.samples.num_sampling_steps = std::min(options.samples.num_sampling_steps, kTracedSamplingSteps);
  const auto sampler = make_sampler(grid_sampler_config(two_steps, objective_config_of(options.objective)));
  const Training training = build_training(options, data, at::kMeta, group);
  return logged_on_meta([&] {
    const ops::OpChoicesScope choices({.time_products = options.compute.untried_gpu.has(Untried::kProducts)});
    const DenoiserShape& shape = training.denoiser->shape();
    const int64_t batch = samples_at_once(options, group->world_size());
    Conditioning cond = batch_on_meta(data, batch).batch.conditioning;
    cond.text.dropped = at::Tensor();
    const double cfg_scale = grid_cfg_scale(options, shape.conditioning);
    const TextRows null_text = shape.conditioning.has_null_text ? TextRows() : cond.text;
    const DenoiseFn denoise =
        guided_denoiser(*training.denoiser, cond,
                        cfg_scale != 1 ? unconditional(shape.conditioning, cond, null_text) : Conditioning(),
                        cfg_scale, CfgConvention::kAuto, forward_of(training));
    const std::vector<int64_t> image_shape = {batch, data.channels, shape.input_size, shape.input_size};
    with_first_ema(*training.state, [&] {
      run_sampler(*sampler, on_meta(image_shape), denoise, [&](int64_t) { return on_meta(image_shape); });
    });
  });
}

MemoryEvents trace_validation(const TrainOptions& options, const DataShape& data, int64_t rows,
                              DryRunDevice device, const std::shared_ptr<ProcessGroup>& group) {
  const DryRunScope dry_run(device);
  const at::NoGradGuard no_grad;
  const Training training = build_training(options, data, at::kMeta, group);
  const auto batch_of = [&](int64_t rows) {
    BatchTensors made = batch_on_meta(data, rows);
    set_timesteps(made.batch, training.objective->timesteps(std::exchange(made.time_uniform, {})));
    return made.batch;
  };
  forward_losses(training, batch_of(1));  // makes the objective's tables, which stay
  // On a CPU the loader's arrays are read where they are.
  std::optional<StepBatch> batch;
  if (device == DryRunDevice::kCpu) batch = batch_of(rows);
  return logged_on_meta([&] {
    const ops::OpChoicesScope choices({.time_products = options.compute.untried_gpu.has(Untried::kProducts)});
    with_first_ema(*training.state, [&] { forward_losses(training, batch ? *batch : batch_of(rows)); });
  });
}

AutoencoderEvents trace_autoencoder(const TrainOptions& options, const DataDescription& data,
                                    DryRunDevice device, int64_t world_size, int64_t validation_rows) {
  const DataShape& shape = data.shape;
  const DryRunScope dry_run(device);
  const at::NoGradGuard no_grad;
  AutoencoderEvents events;
  std::unique_ptr<Autoencoder> autoencoder;
  const BuildOptions build{.device = at::kMeta, .compute_dtype = options.compute.held_dtype()};
  events.load = logged_on_meta([&] {
    autoencoder = build_autoencoder(data.autoencoder->config, build);
    autoencoder->freeze_weights();
  });
  events.decode = logged_on_meta([&] {
    const int64_t batch = samples_at_once(options, world_size);
    autoencoder->decode(on_meta({batch, shape.channels, shape.side(), shape.side()}));
  });
  const int64_t rows = rows_of_walk(options, world_size);
  // On a CPU the loader's arrays are read where they are.
  std::optional<at::Tensor> images;
  if (device == DryRunDevice::kCpu) images = pictures_on_meta(*autoencoder, shape, rows);
  const auto encode = [&](int64_t count) {
    autoencoder->encode(images ? images->narrow(0, 0, count) : pictures_on_meta(*autoencoder, shape, count));
  };
  events.encode = logged_on_meta([&] {
    encode(rows);
    // A single picture may take more than several: ATen convolves it otherwise.
    const int64_t rest = rows_of_last_walk(options, world_size);
    if (rest < rows) encode(rest);
  });
  if (validation_rows > 0) events.validate = logged_on_meta([&] { encode(validation_rows); });
  events.downsample = autoencoder->downsample;
  return events;
}

std::vector<OpRecord> trace_encoding(const AutoencoderOutline& outline, const TrainOptions& options,
                                     const DataShape& data, DryRunDevice device, int64_t world_size) {
  const DryRunScope dry_run(device);
  const at::NoGradGuard no_grad;
  const auto autoencoder =
      build_autoencoder(outline.config, {.device = at::kMeta, .compute_dtype = options.compute.held_dtype()});
  const at::Tensor images = pictures_on_meta(*autoencoder, data, rows_of_walk(options, world_size));
  OpRecorder ops(/*timed=*/false);
  autoencoder->encode(images);
  return ops.take();
}

namespace {

int64_t captions_of_pass(const TrainOptions& options, int64_t world_size) {
  return std::min(captions_at_once(options), (options.global_batch + world_size - 1) / world_size);
}

// Walks as many of the longest captions. An instruction before them is encoded once for all.
void encode_on_meta(const TextEncoder& encoder, int64_t captions, const TextShape& text) {
  const int64_t first = text.hidden_rows, num_tokens = first + captions * text.max_rows;
  TokenRows tokens{.ids = on_meta({num_tokens}, at::kLong)};
  if (first > 0) tokens.host_offsets.push_back(0);
  for (int64_t i = 0; i <= captions; ++i) tokens.host_offsets.push_back(first + i * text.max_rows);
  State state;
  for (const auto& segment : encoder.segments()) state = segment->forward(state, {.tokens = tokens});
}

}  // namespace

TextEncoderEvents trace_text_encoder(const TextEncoderOutline& outline, const TrainOptions& options,
                                     const DataShape& data, DryRunDevice device, int64_t world_size,
                                     int64_t validation_rows) {
  const std::unique_ptr<TextEncoder> encoder = outline.build(options.compute.held_dtype());
  const DryRunScope dry_run(device);
  const at::NoGradGuard no_grad;
  TextEncoderEvents events;
  std::vector<at::Tensor> weights;
  events.load = logged_on_meta([&] {
    for (const auto& weight : encoder->parameters())
      weights.push_back(on_meta(weight->value.sizes(), weight->value.scalar_type()));
  });
  const auto encoded = [&](int64_t captions) {
    return logged_on_meta([&] { encode_on_meta(*encoder, captions, data.text); });
  };
  events.encode = encoded(captions_of_pass(options, world_size));
  if (validation_rows > 0) events.validate = encoded(std::min(captions_at_once(options), validation_rows));
  events.is_streamed =
      outline.room_bytes > 0 && left_bytes(events.load) + peak_bytes(events.encode) > outline.room_bytes;
  if (!events.is_streamed) return events;
  events.load.clear();
  constexpr uint64_t kRoom = uint64_t{1} << 45;
  events.encode = {{.id = kRoom, .bytes = outline.room_bytes}, {.id = kRoom, .bytes = -outline.room_bytes}};
  events.validate = events.encode;
  return events;
}

CaptionEncodingTrace trace_caption_encoding(const TextEncoder& encoder, const TrainOptions& options,
                                            const DataShape& data, DryRunDevice device, int64_t world_size) {
  const DryRunScope dry_run(device);
  const at::NoGradGuard no_grad;
  CaptionEncodingTrace trace{.captions = captions_of_pass(options, world_size)};
  OpRecorder ops(/*timed=*/false);
  encode_on_meta(encoder, trace.captions, data.text);
  trace.ops = ops.take();
  return trace;
}

int64_t text_encoder_bytes(const TrainOptions& options, const DataDescription& data, DryRunDevice device) {
  if (!data.text_encoder) return 0;
  return left_bytes(
      trace_text_encoder(*data.text_encoder, options, data.shape, device, /*world_size=*/1).load);
}

int64_t autoencoder_bytes(const TrainOptions& options, const DataDescription& data, DryRunDevice device) {
  return data.autoencoder ? left_bytes(trace_autoencoder(options, data, device, /*world_size=*/1).load) : 0;
}

}  // namespace kiln
