// How far a training step, or a pass of an encoder or autoencoder, is above its bound on this machine's
// processor, and which operations take the time: a table for benchmarks/results.
//
//   bench_step_operations [OPTION VALUE]...   options of kiln train without dashes: model DiT-S/2
//   bench_step_operations pass NAME DTYPE     t5, gemma2, kl-encode, kl-decode, dc-encode, dc-decode, or two
//                                             guided steps of a sampler, dit-sample or pixart-sample, with
//                                             random weights, in bf16 or f32
//
// The bound (docs/probe.md) is of the model's definition. "Its bound" is of an operation as it ran. The share
// of the peak is of the best square product, as training logs it.
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <numeric>
#include <string>

#include "core/aten.h"
#include "core/error.h"
#include "core/measuring.h"
#include "core/tensors.h"
#include "diffusion/objective.h"
#include "diffusion/sampler.h"
#include "models/autoencoders/autoencoder.h"
#include "models/forward_flops.h"
#include "models/registry.h"
#include "models/text/text_registry.h"
#include "models/weights.h"
#include "ops/op_recorder.h"
#include "parallel/machine.h"
#include "plan/price/step_timing.h"
#include "plan/trace/ideal_step.h"
#include "run/option_values.h"
#include "sample/sampler_loop.h"
#include "watch/step_bound.h"

namespace kiln {
namespace {

struct Measured {
  std::string what;  // the arguments of the program
  at::ScalarType dtype = at::kFloat;
  double seconds = 0;
  std::vector<OpRecord> ops{};  // of one step or pass, timed
  std::vector<IdealSegment> ideal{};
};

void print(const Measured& measured) {
  const double peak = measure_peak_flops(at::kCPU, measured.dtype);
  const nlohmann::json bound =
      bound_json(measured.ideal, measure_rates(at::kCPU, measured.dtype), measured.ops, measured.seconds);
  const auto number = [](const nlohmann::json& from, const char* key) { return from.at(key).get<double>(); };
  const std::chrono::year_month_day today{
      std::chrono::floor<std::chrono::days>(std::chrono::system_clock::now())};
  fmt::print(
      "## `bench_step_operations {}`\n\n{}-{:02}-{:02}, {}, {} threads. Best product: {:.0f} GFLOP/s, square "
      "one: {:.0f} GFLOP/s. Memory: {:.1f} GB/s.\n{:.1f} ms for {:.1f} GFLOP: **{:.0f} % of the bound** "
      "({:.1f} "
      "ms), {:.0f} % of the peak.\n\n| operation | times | ms | its bound, ms | of its bound | of the time "
      "|\n"
      "|---|---|---|---|---|---|\n",
      measured.what, static_cast<int>(today.year()), static_cast<unsigned>(today.month()),
      static_cast<unsigned>(today.day()), machine_name(at::kCPU), at::get_num_threads(),
      number(bound, "flops_per_s") / 1e9, peak / 1e9, number(bound, "bytes_per_s") / 1e9,
      measured.seconds * 1e3, number(bound, "flops") / 1e9, 100 * number(bound, "share"),
      1e3 * number(bound, "seconds"), 100 * number(bound, "flops") / measured.seconds / peak);
  for (const nlohmann::json& row : bound.at("operations"))
    fmt::print("| {} | {} | {:.1f} | {:.1f} | {:.0f} % | {:.1f} % |\n",
               row.at("operation").get<std::string>(), row.at("num").get<int64_t>(),
               1e3 * number(row, "seconds"), 1e3 * number(row, "bound_s"),
               100 * number(row, "bound_s") / number(row, "seconds"), 100 * number(row, "share"));
  fmt::print("\n");
}

Measured measured_step(const TrainOptions& options, const std::string& what) {
  const StepTiming timing = time_steps(options, at::kCPU, {.plain = 5, .watched = 5, .least_seconds = 5});
  return {.what = what,
          .dtype = options.compute.held_dtype(),
          .seconds = timing.seconds,
          .ops = ops_of(timing.spans),
          .ideal = ideal_step(options, synthetic_shape(options))};
}

// Fills in the times of a pass.
Measured timed_pass(Measured measured, const std::function<void()>& run) {
  constexpr int kPasses = 3;
  const auto seconds_of_run = [&] {
    const auto begin = std::chrono::steady_clock::now();
    run();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  run();
  std::vector<double> seconds;
  for (int i = 0; i < kPasses; ++i) seconds.push_back(seconds_of_run());
  measured.seconds = median(seconds);
  OpRecorder recorder(/*timed=*/true);
  run();
  measured.ops = recorder.take();
  return measured;
}

double bytes_of(const ParameterList& parameters, const std::function<bool(const Parameter&)>& is_read) {
  double bytes = 0;
  for (const auto& parameter : parameters)
    if (is_read(*parameter)) bytes += static_cast<double>(parameter->value.nbytes());
  return bytes;
}

// Encoding of texts of equal length. Of the table of tokens only a few rows are read.
Measured text_pass(const PublishedTextEncoder& published, int64_t texts, int64_t tokens, Measured measured) {
  const auto encoder = outline_text_encoder(published, measured.dtype);
  TokenRows rows{.ids = at::empty({texts * tokens}, at::TensorOptions(at::kMeta).dtype(at::kLong))};
  for (int64_t i = 0; i <= texts; ++i) rows.host_offsets.push_back(i * tokens);
  const std::vector<SegmentWork> work = forward_work(*encoder, {.tokens = rows}, measured.dtype);
  for (size_t i = 0; i < work.size(); ++i)
    measured.ideal.push_back(
        {.name = work[i].name,
         .flops = work[i].flops,
         .bytes = bytes_of(encoder->segments()[i]->parameters(),
                           [&](const Parameter& p) { return &p != encoder->token_table().get(); })});
  for (const auto& parameter : encoder->parameters())
    parameter->value = at::empty_like(parameter->value, at::kCPU).normal_(0, 0.02);
  constexpr int64_t kOrdinary = 5;  // ids below are often special
  rows.ids = at::randint(kOrdinary, encoder->shape().vocabulary_size, {texts * tokens}, at::kLong);
  return timed_pass(std::move(measured), [&] { encoder->encode_batch({.tokens = rows}); });
}

Measured autoencoder_pass(const nlohmann::json& config, bool encodes, int64_t batch, Measured measured) {
  constexpr int64_t kSide = 256;
  const auto pass = [&](const Autoencoder& autoencoder, const at::TensorOptions& options) {
    const int64_t side = encodes ? kSide : kSide / autoencoder.downsample;
    const at::Tensor input =
        at::zeros({batch, encodes ? 3 : autoencoder.latent_channels, side, side}, options);
    return encodes ? autoencoder.encode(input) : autoencoder.decode(input);
  };
  IdealSegment& ideal = measured.ideal.emplace_back(IdealSegment{.name = encodes ? "encoder" : "decoder"});
  {
    const DryRunScope dry_run(DryRunDevice::kCuda);  // whose operations are all counted
    const auto outline = build_autoencoder(config, {.device = at::kMeta, .compute_dtype = measured.dtype});
    OpRecorder recorder(/*timed=*/false);
    pass(*outline, at::kMeta);
    for (const OpRecord& op : recorder.take()) ideal.flops += op.flops;
  }
  const auto autoencoder = build_autoencoder(config, {.compute_dtype = measured.dtype});
  initialize_weights(autoencoder->parameters(), /*seed=*/0);
  autoencoder->freeze_weights();
  ideal.bytes = bytes_of(autoencoder->parameters(),
                         [&](const Parameter& p) { return p.key.starts_with(ideal.name + "."); });
  return timed_pass(std::move(measured), [&] { pass(*autoencoder, at::kCPU); });
}

// Two steps of a sampler under guidance, as `kiln sample` runs them, without decoding.
Measured sample_pass(const std::string& model, const nlohmann::json& config, Measured measured) {
  constexpr int64_t kSteps = 2, kBatch = 8, kRows = 2 * kBatch;  // guidance doubles the rows
  const auto outline = build_denoiser(model, config, {.device = at::kMeta});
  const ConditioningShape& takes = outline->shape().conditioning;
  const int64_t side = outline->shape().input_size;
  const std::vector<SegmentWork> work =
      forward_work(*outline, outline->shape().native_extent(), measured.dtype);
  for (size_t i = 0; i < work.size(); ++i) {
    IdealSegment& ideal = measured.ideal.emplace_back(
        IdealSegment{.name = work[i].name, .flops = kSteps * kRows * work[i].flops});
    const ParameterList& parameters = outline->segments()[i]->parameters();
    for (const auto& parameter : parameters)
      ideal.bytes += static_cast<double>(kSteps * parameter->value.numel()) *
                     static_cast<double>(c10::elementSize(measured.dtype));
  }
  const auto denoiser = build_denoiser(model, config, {.compute_dtype = measured.dtype});
  initialize_weights(*denoiser, /*seed=*/0);
  freeze_weights(*denoiser, measured.dtype);
  Conditioning cond;
  if (takes.takes_labels()) cond.class_labels = at::arange(kBatch, at::kLong);
  if (takes.takes_text())
    cond.text = text_rows_of(at::randn({kBatch, takes.max_text_tokens, takes.text_width}), /*mask=*/{});
  const auto sampler = make_sampler(sampler_config("ddpm", kSteps, objective_config("iddpm")));
  const DenoiseFn denoise =
      guided_denoiser(*denoiser, cond, unconditional(takes, cond), /*cfg_scale=*/4, CfgConvention::kModel);
  std::vector<int64_t> images(kBatch);
  std::iota(images.begin(), images.end(), 0);
  const std::vector<int64_t> shape = {denoiser->shape().in_channels, side, side};
  return timed_pass(std::move(measured), [&] {
    run_sampler(*sampler, start_noise(0, images, shape), denoise,
                [&](int64_t step) { return step_noise(0, images, shape, step); });
  });
}

Measured measured_pass(const std::string& name, const std::string& dtype) {
  const c10::InferenceMode inference;
  Measured measured{.what = fmt::format("pass {} {}", name, dtype), .dtype = parse_compute_dtype(dtype)};
  // The shapes of benchmarks/peers/text_encoders.py: T5 v1.1-base, and two layers of Gemma 2 2B.
  if (name == "t5")
    return text_pass({.name = "t5",
                      .family = "t5_encoder",
                      .config = {{"d_model", 768},
                                 {"d_kv", 64},
                                 {"d_ff", 2048},
                                 {"num_layers", 12},
                                 {"num_heads", 12},
                                 {"vocab_size", 32128},
                                 {"feed_forward_proj", "gated-gelu"}}},
                     4, 300, std::move(measured));
  if (name == "gemma2")
    return text_pass({.name = "gemma2",
                      .family = "gemma2",
                      .config = {{"hidden_size", 2304},
                                 {"num_hidden_layers", 2},
                                 {"num_attention_heads", 8},
                                 {"num_key_value_heads", 4},
                                 {"head_dim", 256},
                                 {"intermediate_size", 9216},
                                 {"vocab_size", 8000}}},
                     4, 230, std::move(measured));
  const bool encodes = name.ends_with("-encode");
  if (name == "kl-encode" || name == "kl-decode")
    return autoencoder_pass(published_autoencoder(8, 4).config, encodes, 2, std::move(measured));
  if (name == "dc-encode" || name == "dc-decode")
    return autoencoder_pass(published_autoencoder(32, 32).config, encodes, 8, std::move(measured));
  // The models of benchmarks/bound.py's steps.
  if (name == "dit-sample") return sample_pass("DiT-S/2", nlohmann::json::object(), std::move(measured));
  if (name == "pixart-sample")
    return sample_pass("pixart", {{"input_size", 64}, {"hidden_size", 384}, {"depth", 12}, {"num_heads", 6}},
                       std::move(measured));
  fail("step_operations",
       "expected t5, gemma2, kl-encode, kl-decode, dc-encode, dc-decode, dit-sample or pixart-sample, got "
       "'{}'",
       name);
}

void run(int argc, char** argv) {
  apply({.device = at::kCPU});
  if (argc == 4 && std::string(argv[1]) == "pass") return print(measured_pass(argv[2], argv[3]));
  TrainOptions options;
  std::string command;
  if (argc % 2 == 0)
    fail("step_operations", "expected pairs of an option and a value, got '{}' alone", argv[argc - 1]);
  for (int i = 1; i + 1 < argc; i += 2) {
    const nlohmann::json number = nlohmann::json::parse(argv[i + 1], nullptr, /*allow_exceptions=*/false);
    set_option(options, argv[i], number.is_number() ? number : nlohmann::json(argv[i + 1]));
    command += fmt::format("{}{} {}", i > 1 ? " " : "", argv[i], argv[i + 1]);
  }
  print(measured_step(options, command));
}

}  // namespace
}  // namespace kiln

int main(int argc, char** argv) {
  try {
    kiln::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
