#include "models/load_model.h"

#include <cstdio>
#include <filesystem>
#include <span>

#include "checkpoint/tensor_files.h"
#include "checkpoint/weights_file.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/files/xxh3.h"
#include "models/registry.h"
#include "models/run_folder.h"

namespace kiln {
namespace {

using nlohmann::json;

WeightShapes shapes_of(const TensorMap& weights) {
  WeightShapes shapes;
  for (const auto& [key, tensor] : weights) shapes[key] = tensor.sizes().vec();
  return shapes;
}

// Returns what the weights are, or nothing.
std::optional<RecognisedDenoiser> recognised(const WeightShapes& shapes, const json& config) {
  try {
    return recognise_denoiser(shapes, config);
  } catch (const Error&) {  // the keys are a family's, and loading says what does not fit
    return std::nullopt;
  }
}

void load_named(const std::string& name, const json& config, const std::string& source, LoadedModel& loaded) {
  const WeightShapes shapes = shapes_of(loaded.weights);
  loaded.name = name;
  loaded.family = &family_of(name);
  const auto found = recognised(shapes, config);
  if (found && found->family != loaded.family)
    fail("weights", "{} holds weights of {}, not of {}", source, found->family->name, name);
  loaded.model.config = resolve_denoiser_config(name, config, shapes);
  // A family's own name says nothing of what shapes leave open.
  if (found && name == loaded.family->name) {
    loaded.model.assumed = found->model.assumed;
    for (const std::string& key : loaded.model.assumed) loaded.model.config[key] = found->model.config[key];
  }
  loaded.weights = model_weights(*loaded.family, loaded.model.config, loaded.weights, source);
}

void load_recognised(const json& hints, const std::string& source, LoadedModel& loaded) {
  auto found = recognise_denoiser(shapes_of(loaded.weights), hints);
  if (!found) return;
  loaded.family = found->family;
  loaded.model = std::move(found->model);
  loaded.name = preset_name(*loaded.family, loaded.model.config);
  // The name of a published model settles what shapes leave open.
  if (loaded.name != loaded.family->name) loaded.model.assumed.clear();
  loaded.weights = model_weights(*loaded.family, loaded.model.config, loaded.weights, source);
}

// Returns the family that reads this diffusers class; `name`: the one that must.
ForeignFamily foreign_family_of(const WeightsSource& source, const std::string& name) {
  const std::string class_name = source.foreign.at("_class_name");
  if (name.empty()) return foreign_family(class_name);
  const Family& family = family_of(name);
  for (const ForeignFormat& format : family.formats)
    if (class_name == format.class_name) return {&family, &format};
  fail("weights", "{} holds weights of {}, not of {}", source.path, foreign_family(class_name).family->name,
       name);
}

void load_foreign(const WeightsSource& source, const std::string& name, const json& overrides,
                  LoadedModel& loaded) {
  const auto [family, format] = foreign_family_of(source, name);
  loaded.family = family;
  json config = format->config_from(source.foreign, source.path);  // throws for what the family does not have
  if (!name.empty() && !source.record.model.empty()) config = source.record.model_config;
  config.update(overrides);
  loaded.model.config = family->resolve(config);
  loaded.name = name.empty() ? preset_name(*family, loaded.model.config) : name;
  loaded.weights = format->weights_from(loaded.model.config, loaded.weights, source.path);
  loaded.has_null_rows = *format->null_rows_key == '\0' || source.has_null_rows;
}

void say_other_base(const std::string& source, const std::string& wanted, const std::string& found,
                    bool anyway) {
  say_mismatch(
      fmt::format("{} was trained to change the weights {}, and these are {}", source, wanted, found),
      "give its own base", anyway);
}

std::vector<LoraLayer> layers_of_run(const WeightsSource& run) {
  return lora_layers(load_tensors(run.path), run.record.adapter.config, run.path);
}

// Returns nothing for an adapter of another program.
std::optional<ModelRecord> record_of_adapter(const std::string& path, bool ema) {
  if (is_run_folder(path)) return find_weights(path, {.ema = ema}).record;
  const std::filesystem::path folder = path;
  const std::string file =
      std::filesystem::is_directory(folder) ? (folder / "adapter_model.safetensors").string() : path;
  if (!std::filesystem::exists(file) || tensor_file_format(file) != TensorFileFormat::kSafetensors)
    return std::nullopt;
  return record_of(open_safetensors(file)->metadata(), file);
}

LoadedModel load_adapted(const WeightsSource& source, const LoadModelOptions& options) {
  const ModelRecord& record = source.record;
  const std::string path = options.base.empty() ? record.adapter.base_path : options.base;
  std::error_code unreachable;
  if (!std::filesystem::exists(path, unreachable))
    fail("weights", "{} changes the weights of {}, which is not there: say where they are with --base PATH",
         source.path, path);
  json config = record.model_config;
  config.update(options.config);
  const WeightsSource base = find_weights(path);
  LoadedModel loaded = load_model(base, {.model = record.model, .config = config});
  const std::string digest = digest_of_weights(base.path);
  if (digest != record.adapter.base_fingerprint) {
    // Runs of earlier versions know only the bytes of their base's file.
    if (record.adapter.base_values.empty())
      say_other_base(source.path, record.adapter.base_fingerprint, digest, options.anyway);
    check_base(record.adapter, source.path, loaded, options.anyway);
  }
  merge_layers(loaded.weights, layers_of_run(source), loaded.base());
  return loaded;
}

}  // namespace

LoadedModel load_model(const WeightsSource& source, const LoadModelOptions& options) {
  if (!source.record.adapter.config.is_null()) return load_adapted(source, options);
  if (!source.record.adapter.base_fingerprint.empty())
    fail("weights", "{} holds an adapter: give its base ({}) as weights, and the adapter beside them",
         source.path, source.record.adapter.base_path);
  const std::string name = options.model.empty() ? source.record.model : options.model;
  LoadedModel loaded;
  loaded.weights = load_tensors(source.path, options.ema);
  if (!source.foreign.is_null()) {
    load_foreign(source, name, options.config, loaded);
    return loaded;
  }
  json config = source.record.model_config;
  config.update(options.config);
  if (name.empty())
    load_recognised(config, source.path, loaded);
  else
    load_named(name, config, source.path, loaded);
  return loaded;
}

std::string fingerprint_of_values(const LoadedModel& model) {
  TensorMap weights = model.weights;
  if (!model.family->formats.empty()) try {
      weights = model.family->formats.front().weights_to(model.model.config, model.weights);
    } catch (const Error&) {  // diffusers' class cannot hold this model: it has its own keys alone
    }
  std::string text;
  for (const auto& [key, tensor] : weights) {
    const at::Tensor rounded = tensor.to(at::kCPU, at::kBFloat16).contiguous();
    text += key;
    text += xxh3_hex(std::span(static_cast<const std::byte*>(rounded.const_data_ptr()), rounded.nbytes()));
  }
  return "xxh3:" + xxh3_hex(std::as_bytes(std::span(text)));
}

void check_base(const ModelRecord::AdapterInfo& adapter, const std::string& source, const LoadedModel& model,
                bool anyway) {
  if (adapter.base_values.empty() || !model.family) return;
  if (const std::string found = fingerprint_of_values(model); found != adapter.base_values)
    say_other_base(source, adapter.base_values, found, anyway);
}

size_t merge_adapter_at(const std::string& path, bool ema, bool anyway, LoadedModel& model) {
  if (const auto record = record_of_adapter(path, ema)) check_base(record->adapter, path, model, anyway);
  if (!is_run_folder(path)) return merge_adapter(model.weights, path, model.base());
  const WeightsSource run = find_weights(path, {.ema = ema});
  if (run.record.adapter.config.is_null()) fail("weights", "{} trained no adapter, but a model", path);
  const std::vector<LoraLayer> layers = layers_of_run(run);
  merge_layers(model.weights, layers, model.base());
  return layers.size();
}

ModelRecord record_with_adapter(const ModelRecord& base, const std::string& path, bool ema) {
  std::optional<ModelRecord> record = record_of_adapter(path, ema);
  if (!record || record->model.empty()) return base;
  record->adapter = {};
  if (!base.autoencoder.path.empty()) record->autoencoder.path = base.autoencoder.path;
  if (!base.text.encoder_path.empty()) record->text.encoder_path = base.text.encoder_path;
  if (base.model_config.empty()) return *record;
  record->model = base.model;
  record->model_config = base.model_config;
  return *record;
}

void say_mismatch(const std::string& text, const std::string& advice, bool anyway) {
  if (!anyway) fail("weights", "{}: {}, or go on with --anyway", text, advice);
  fmt::print(stderr, "warning: {}\n", text);
}

}  // namespace kiln
