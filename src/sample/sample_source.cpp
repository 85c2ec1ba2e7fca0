#include "sample/sample_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <span>

#include "checkpoint/weights_file.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/files/xxh3.h"
#include "core/json_config.h"
#include "core/text/json_text.h"
#include "core/text/printable.h"
#include "diffusion/scheduler_config.h"
#include "models/autoencoders/tiling.h"
#include "models/load_model.h"
#include "models/model_record.h"
#include "models/piece_checks.h"
#include "models/registry.h"
#include "parallel/machine.h"
#include "parallel/ranks/agreement.h"
#include "run/published_settings.h"
#include "sample/sampler_loop.h"

namespace kiln {
namespace {

using nlohmann::json;

std::string fingerprint_of(const std::map<std::string, at::Tensor>& weights) {
  std::string parts;
  for (const auto& [key, tensor] : weights) {
    const at::Tensor bytes = tensor.contiguous();
    parts += key + xxh3_hex(std::span(static_cast<const std::byte*>(bytes.const_data_ptr()), bytes.nbytes()));
  }
  return "xxh3:" + xxh3_hex(std::as_bytes(std::span(parts)));
}

void check_sources(const SampleCommand& command) {
  if (command.run.empty() == command.weights.empty()) fail("sample", "expected either --run or --weights");
  if (!command.run.empty() &&
      (!command.model.empty() || !command.model_config.empty() || command.image_size > 0))
    fail("sample", "--model, --model-config and --image-size have no effect with --run: its config has them");
  if (command.no_ema && command.ema_decay) fail("sample", "expected --ema-decay or --no-ema, not both");
}

// True if there are the model's own weights beside an average: in a folder, or in a .pt file.
bool has_average_too(const std::string& weights, const std::string& model) {
  if (find_weights(weights).path != model) return true;
  return tensor_file_format(model) == TensorFileFormat::kPt &&
         open_tensor_file(model, /*prefer_ema=*/true)->metadata() !=
             open_tensor_file(model, /*prefer_ema=*/false)->metadata();
}

WeightsSource find_weights_of(const SampleCommand& command) {
  WeightsSource found =
      find_weights(command.weights, {.ema = !command.no_ema, .ema_decay = command.ema_decay});
  if (command.ema_decay && found.step.empty())
    fail("sample", "--ema-decay chooses among a run's averages: --weights has one");
  // With an adapter it may be about that one's run.
  if (command.no_ema && found.step.empty() && command.adapter.empty() &&
      !has_average_too(command.weights, found.path))
    fail("sample", "--no-ema leaves out an average, and {} holds one set of weights: leave out --no-ema",
         found.path);
  return found;
}

std::string autoencoder_path(const SampleCommand& command, const ModelRecord& record, int64_t channels) {
  if (!command.autoencoder.empty()) return command.autoencoder;
  const ModelRecord::AutoencoderInfo& trained = record.autoencoder;
  if (trained.name == "pixels") return "pixels";
  constexpr int64_t kRgb = 3;
  if (!trained.name.empty() || !trained.path.empty() || channels != kRgb) return trained.path;
  fmt::print(stderr,
             "note: the model makes 3 channels, taken for pixels: give --autoencoder if they are latents\n");
  return "pixels";
}

std::unique_ptr<Autoencoder> load_autoencoder_of(const SampleCommand& command, const ModelRecord& record,
                                                 int64_t channels, at::Device device,
                                                 at::ScalarType compute_dtype, int64_t num_processes) {
  const std::string path = autoencoder_path(command, record, channels);
  std::error_code unreachable;
  if (path.empty() || (path != "pixels" && !std::filesystem::exists(path, unreachable)))
    fail("sample", "{}: give the autoencoder of the latents with --autoencoder, or --autoencoder pixels",
         path.empty()  ? "no autoencoder is known"
         : unreachable ? fmt::format("{}: {}", path, unreachable.message())
                       : path + " does not exist");
  auto autoencoder =
      load_autoencoder(path, device, compute_dtype,
                       Tiling::parse("tiles", command.tiles, usable_bytes(device, num_processes)));
  if (const std::string text = autoencoder_mismatch(record.autoencoder, *autoencoder, path); !text.empty())
    say_mismatch(text, "give the recorded one with --autoencoder", command.anyway);
  return autoencoder;
}

// Settles the objective. `scheduler`: that of a diffusers folder.
void settle_objective(const SampleCommand& command, const json& scheduler, DrawingSource& source) {
  ModelRecord& record = source.record;
  const json recorded = record.objective;
  if (recorded.is_object() && scheduler.is_object()) {
    const json told = objective_of_scheduler(scheduler);
    if (told.is_object() && !have_same_schedule(recorded, told))
      say_mismatch(fmt::format("{} was trained with {}, but scheduler_config.json beside it says {}",
                               source.weights, objective_text(recorded), objective_text(told)),
                   "restore that file", command.anyway);
  }
  record.objective = objective_of(record, scheduler, record.model,
                                  {.name = command.objective, .flow_shift = command.flow_shift});
  if (record.objective.is_null()) {
    record.objective = published_objective_config(record.model, "");
    source.published.push_back("objective " + objective_text(record.objective));
  }
  if (recorded.is_object() && !have_same_schedule(recorded, record.objective))
    fmt::print(stderr, "warning: {} was trained with {}, and is drawn with {} as asked\n", source.weights,
               objective_text(recorded), objective_text(record.objective));
  // Neither a file nor the record of another objective says whether sigma is learned; the channels do.
  const DenoiserShape& shape = source.denoiser->shape();
  if (record.objective.at("type") == "iddpm" &&
      !(recorded.is_object() && recorded.at("type") == record.objective.at("type")))
    record.objective["learn_sigma"] = shape.predicts_sigma();
}

// Names settings of --model-config that are others than the weights were trained with.
void warn_of_other_config(const json& config, const WeightsSource& found) {
  const json& trained = found.record.model_config;
  for (const auto& [key, value] : config.items())
    if (trained.contains(key) && trained.at(key) != value)
      fmt::print(stderr, "warning: {} was trained with {} {}, and is drawn with {} as asked\n", found.path,
                 printable(key), printable(brief(trained.at(key))), brief(value));
}

// Throws Error where the weights hold a table, such as one of positions, that is not of the size that the
// model's config has now. `own_side`: that of the weights' pictures in pixels.
void require_tables_of_size(const LoadedModel& loaded, int64_t own_side) {
  const auto outline = loaded.family->build(loaded.model.config, {.device = at::kMeta, .outline = true});
  for (const auto& parameter : outline->parameters())
    if (const auto stored = loaded.weights.find(parameter->key);
        !parameter->trainable && stored != loaded.weights.end() &&
        stored->second.sizes() != parameter->value.sizes())
      fail("sample", "{} draws pictures of {} px only, which its {} is for: leave out --image-size",
           loaded.path, own_side, parameter->key);
}

// Sets the side of the model's pictures that the command asks for, by itself or in the model's config.
void set_image_size(const SampleCommand& command, const json& config, int64_t downsample, LoadedModel& loaded,
                    ModelRecord& record) {
  if (command.image_size == 0) {
    if (config.contains(loaded.family->size_key)) record.image_size = 0;
    return;
  }
  if (command.image_size < 0 || command.image_size % downsample != 0)
    fail("sample", "expected --image-size to be a multiple of {}, got {}", downsample, command.image_size);
  json& side = loaded.model.config[loaded.family->size_key];
  const int64_t own_side = side.get<int64_t>() * downsample;
  side = command.image_size / downsample;
  loaded.model.config = loaded.family->resolve(loaded.model.config);
  require_tables_of_size(loaded, own_side);
  std::erase(loaded.model.assumed, loaded.family->size_key);
  record.image_size = 0;
}

// Adds what the shapes of the weights leave open and usual values settle.
void note_assumed(const LoadedModel& loaded, int64_t downsample, DrawingSource& source) {
  for (const std::string& key : loaded.model.assumed) {
    const json& value = loaded.model.config.at(key);
    source.usual.push_back(key == loaded.family->size_key
                               ? fmt::format("pictures of {} px", value.get<int64_t>() * downsample)
                               : fmt::format("{} {}", key, value.dump()));
  }
  if (loaded.has_null_rows) return;
  source.record.drawing.unconditional = "empty_caption";
  source.usual.emplace_back("guidance away from the empty caption");
}

std::string average_of(const SampleCommand& command, const WeightsSource& found) {
  if (!found.record.average.empty()) return found.record.average;
  return command.no_ema ? "model" : "of the file";
}

// Gives tables that are computed, such as positions, and that a file holds in less precision all of theirs
// back: diffusers computes them too.
void restore_tables(const ParameterList& parameters, const TensorMap& weights) {
  for (const auto& parameter : parameters) {
    const at::Tensor& computed = parameter->init.value;
    const auto stored = weights.find(parameter->key);
    if (computed.defined() && stored != weights.end() && computed.sizes() == stored->second.sizes() &&
        at::equal(computed.to(stored->second.options()), stored->second))
      parameter->value = computed.to(parameter->value.options());
  }
}

}  // namespace

void settle_weights(SampleCommand& command, ProcessGroup& group) {
  check_sources(command);
  const std::string run = command.run.empty() ? command.weights : command.run;
  if (command.run.empty() && !is_run_folder(run)) return;
  std::string weights;
  agree(group, "the weights of the run", [&] {
    if (group.rank() != 0) return;
    read_run_info(run);  // says what is no run
    weights = find_weights(run, {.ema = !command.no_ema, .ema_decay = command.ema_decay}).path;
  });
  command.weights = group.gather(weights, "the weights of the run").front();
  command.run.clear();
}

DrawingSource load_drawing_source(const SampleCommand& command, at::Device device,
                                  at::ScalarType compute_dtype, int64_t num_processes) {
  WeightsSource found = find_weights_of(command);
  std::optional<FoundAdapter> adapter;
  if (!command.adapter.empty()) {
    adapter = find_adapter(command.adapter, !command.no_ema);
    found.record = record_with_adapter(found.record, *adapter);
  }
  const json config = read_json_option("sample", "--model-config", command.model_config);
  LoadedModel loaded = load_model(found, {.ema = !command.no_ema,
                                          .model = command.model,
                                          .config = config,
                                          .base = command.base,
                                          .anyway = command.anyway});
  if (!loaded.family && std::ranges::any_of(loaded.weights, [](const auto& entry) {
        return entry.first.find("lora_") != std::string::npos;
      }))
    fail("sample", "{} holds an adapter: give it with --adapter, and its base with --weights", found.path);
  if (!loaded.family) {
    refuse_other_piece(found.path, loaded.weights);
    fail("sample",
         "{} holds no known denoiser: give a pipeline's unet or transformer, or name the model with --model "
         "(DiT-XL/2, ...)",
         found.path);
  }
  warn_of_other_config(config, found);
  DrawingSource source;
  source.record = found.record;
  source.record.model = loaded.name;
  source.weights = found.path;
  source.average = average_of(command, found);
  const int64_t channels =
      loaded.family->build(loaded.model.config, {.device = at::kMeta, .outline = true})->shape().in_channels;
  source.autoencoder =
      load_autoencoder_of(command, source.record, channels, device, compute_dtype, num_processes);
  const int64_t downsample = source.autoencoder->downsample;
  set_image_size(command, config, downsample, loaded, source.record);
  note_assumed(loaded, downsample, source);
  if (adapter) merge_found_adapter(*adapter, command.anyway, loaded);
  source.record.model_config = loaded.model.config;
  source.weights_fingerprint = fingerprint_of(loaded.weights);
  source.denoiser =
      loaded.family->build(loaded.model.config, {.device = device, .compute_dtype = compute_dtype});
  load_weights(*source.denoiser, loaded.weights, source.weights);
  restore_tables(source.denoiser->parameters(), loaded.weights);
  settle_objective(command, found.scheduler, source);
  freeze_weights(*source.denoiser, compute_dtype);
  return source;
}

}  // namespace kiln
