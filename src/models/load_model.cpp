#include "models/load_model.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <span>

#include "checkpoint/tensor_files.h"
#include "checkpoint/weights_file.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/files/xxh3.h"
#include "core/text/printable.h"
#include "models/model_record.h"
#include "models/piece_checks.h"
#include "models/registry.h"

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

// Reads the null rows of a pipeline's folder into those of the model, which have their shape.
void read_null_rows(const std::string& path, at::Tensor& rows) {
  const TensorMap tensors = load_tensors(path);
  const auto found = tensors.find(kNullRowsTensor);
  if (found == tensors.end() || found->second.sizes() != rows.sizes())
    fail("weights", "expected {} of shape {} in {}", kNullRowsTensor, fmt::join(rows.sizes(), " x "), path);
  rows = found->second;
}

// Reads weights of a class of diffusers. `null_rows`: the file that has theirs, or "".
void load_of_class(const ForeignFormat& format, const std::string& null_rows, const std::string& source,
                   LoadedModel& loaded) {
  loaded.weights = format.weights_from(loaded.model.config, loaded.weights, source);
  if (*format.null_rows_key == '\0') return;
  loaded.has_null_rows = !null_rows.empty();
  if (loaded.has_null_rows) read_null_rows(null_rows, loaded.weights.at(format.null_rows_key));
}

// Reads the weights of a file that was taken out of a pipeline's folder, and returns true if it is one: its
// keys are those of the class and not of the model itself.
bool load_component(const std::string& name, const json& config, const std::string& source,
                    LoadedModel& loaded) {
  if (file_keys_of(*loaded.family, loaded.weights) != nullptr) return false;
  const TensorMap of_file = loaded.weights;
  const auto have_same_key = [](const auto& a, const auto& b) { return a.first == b.first; };
  for (const ForeignFormat& format : loaded.family->formats) try {
      loaded.model.config = resolve_denoiser_config(name, config);
      load_of_class(format, /*null_rows=*/"", source, loaded);
      if (!std::ranges::equal(of_file, loaded.weights, have_same_key)) return true;
    } catch (const Error&) {  // these are no keys of the class
    }
  loaded.has_null_rows = true;
  return false;
}

void load_named(const std::string& name, const json& config, const std::string& source, LoadedModel& loaded) {
  const WeightShapes shapes = shapes_of(loaded.weights);
  loaded.name = name;
  loaded.family = &family_of(name);
  const auto found = recognised(shapes, config);
  if (!found) refuse_other_piece(source, loaded.weights);
  const bool is_own = found && found->family == loaded.family;
  if (!is_own && load_component(name, config, source, loaded)) return;
  if (found && !is_own)
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
  const bool has_record =
      !name.empty() && !source.record.model.empty() && &family_of(source.record.model) == family;
  // What the record leaves out the file's config.json assumes.
  if (has_record) config.update(source.record.model_config);
  config.update(overrides);
  loaded.model.config = family->resolve(config);
  loaded.name = name.empty() ? preset_name(*family, loaded.model.config) : name;
  load_of_class(*format, source.null_rows, source.path, loaded);
  if (!has_record || name != family->name) return;
  json known = source.record.model_config;
  known.update(overrides);
  if (const auto found = recognised(shapes_of(loaded.weights), known); found && found->family == family)
    loaded.model.assumed = found->model.assumed;
}

// Returns the XXH3 of keys and values, rounded to `first` and then to bf16.
std::string digest_of(const TensorMap& weights, at::ScalarType first) {
  std::string text;
  for (const auto& [key, tensor] : weights) {
    const at::Tensor rounded = tensor.to(at::kCPU, first).to(at::kBFloat16).contiguous();
    text += key;
    text += xxh3_hex(std::span(static_cast<const std::byte*>(rounded.const_data_ptr()), rounded.nbytes()));
  }
  return xxh3_hex(std::as_bytes(std::span(text)));
}

// Values as they are and rounded to f16 before.
std::string digests_of(const TensorMap& weights) {
  return weights.empty() ? "-" : digest_of(weights, at::kFloat) + "-" + digest_of(weights, at::kHalf);
}

// Compares two of fingerprint_of_values(). Returns the parts of both that differ, or nothing.
std::optional<std::array<std::string, 2>> different_values(const std::string& recorded,
                                                           const std::string& found) {
  const auto parts_of = [](const std::string& text) {
    std::array<std::string, 4> parts;  // those of earlier versions have the first
    size_t part = 0;
    for (const char c : text.substr(text.find(':') + 1))
      if (c != '-')
        parts[part] += c;
      else if (++part == parts.size())
        break;
    return parts;
  };
  const auto a = parts_of(recorded), b = parts_of(found);
  if (a[0] != b[0] && a[0] != b[1] && a[1] != b[0]) return std::array{"xxh3:" + a[0], "xxh3:" + b[0]};
  const bool has_null_rows = !a[2].empty() && !b[2].empty();
  if (has_null_rows && a[2] != b[2] && a[2] != b[3] && a[3] != b[2])
    return std::array{"null rows xxh3:" + a[2], "null rows xxh3:" + b[2]};
  return std::nullopt;
}

std::vector<LoraLayer> layers_of_run(const WeightsSource& run) {
  return lora_layers(load_tensors(run.path), run.record.adapter.config, run.path);
}

std::string name_of(const std::filesystem::path& path) {
  return (path.has_filename() ? path : path.parent_path()).filename().string();
}

// Returns nothing for an adapter of another program.
std::optional<ModelRecord> record_in_adapter(const std::string& path) {
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
  if (!base.record.adapter.config.is_null())
    fail("weights",
         "{} is an adapter itself, no base for {}: give the weights that it changes with --base PATH", path,
         source.path);
  LoadedModel loaded = load_model(base, {.model = record.model, .config = config});
  check_base(record.adapter, source.path, loaded, options.anyway);
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
  loaded.path = source.path;
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

const Family* family_of_weights(const WeightsSource& source, bool ema, const json& config) {
  const std::string& name = source.record.model;
  if (!source.foreign.is_null()) return foreign_family_of(source, name).family;
  if (!name.empty()) return &family_of(name);
  json hints = source.record.model_config;
  hints.update(config);
  const auto found = recognise_denoiser(shapes_of(load_tensors(source.path, ema)), hints);
  return found ? found->family : nullptr;
}

std::string fingerprint_of_values(const LoadedModel& model) {
  TensorMap weights = model.weights;
  if (!model.family->formats.empty()) try {
      weights = model.family->formats.front().weights_to(model.model.config, model.weights);
    } catch (const Error&) {  // diffusers' class cannot hold this model: it has its own keys alone
    }
  TensorMap null_rows;
  if (!model.family->formats.empty()) {
    const char* const key = model.family->formats.front().null_rows_key;
    if (const auto rows = model.weights.find(key); rows != model.weights.end() && model.has_null_rows)
      null_rows.insert(*rows);
    weights.erase(key);
  }
  return fmt::format("xxh3:{}-{}", digests_of(weights), digests_of(null_rows));
}

void check_base(const ModelRecord::AdapterInfo& adapter, const std::string& source, const LoadedModel& model,
                bool anyway) {
  if (adapter.base_fingerprint.empty() && adapter.base_values.empty()) return;
  const std::string digest = digest_of_weights(model.path);
  if (digest == adapter.base_fingerprint) return;
  if (adapter.base_values.empty() || !model.family) {
    // Runs of earlier versions know only the bytes of their base's file.
    say_mismatch(
        fmt::format("{} was trained to change the weights of a file {}, and {} is another file ({}): "
                    "whether it holds the same values cannot be told",
                    source, adapter.base_fingerprint, model.path, digest),
        "give its own base", anyway);
    return;
  }
  if (const auto parts = different_values(adapter.base_values, fingerprint_of_values(model)))
    say_mismatch(
        fmt::format("{} was trained to change the weights of {} ({}), and {} holds other values ({})", source,
                    adapter.base_path.empty() ? "another base" : adapter.base_path, parts->front(),
                    model.path, parts->back()),
        "give its own base", anyway);
}

FoundAdapter find_adapter(const std::string& path, bool ema) {
  if (!is_run_folder(path)) return {.path = path, .record = record_in_adapter(path)};
  FoundAdapter found{.path = path, .run = find_weights(path, {.ema = ema})};
  found.record = found.run->record;
  return found;
}

size_t merge_found_adapter(const FoundAdapter& adapter, bool anyway, LoadedModel& model) {
  if (adapter.record) check_base(adapter.record->adapter, adapter.path, model, anyway);
  if (!adapter.run) return merge_adapter(model.weights, adapter.path, model.base());
  if (adapter.run->record.adapter.config.is_null())
    fail("weights", "{} is the run of a model: give the run or the file of an adapter", adapter.path);
  const std::vector<LoraLayer> layers = layers_of_run(*adapter.run);
  merge_layers(model.weights, layers, model.base());
  return layers.size();
}

ModelRecord record_with_adapter(const ModelRecord& base, const FoundAdapter& adapter) {
  std::optional<ModelRecord> record = adapter.record;
  const bool is_known = record && !record->model.empty();
  if (!is_known) {
    record = base;
    record->average.clear();  // an average of the base alone
  }
  json& seen = record->trained_on;
  if (is_known && !base.trained_on.empty()) seen["earlier"] = json::array({base.trained_on});
  seen["adapters"] = base.trained_on.value("adapters", json::array());
  seen["adapters"].push_back(name_of(adapter.path));
  if (!is_known) return *record;
  record->adapter = base.adapter;
  if (!base.autoencoder.path.empty()) record->autoencoder.path = base.autoencoder.path;
  if (!base.text.encoder_path.empty()) record->text.encoder_path = base.text.encoder_path;
  if (base.model_config.empty()) return *record;
  record->model = base.model;
  record->model_config = base.model_config;
  return *record;
}

void say_mismatch(const std::string& text, const std::string& advice, bool anyway) {
  if (!anyway) fail("weights", "{}: {}, or go on with --anyway", text, advice);
  fmt::print(stderr, "warning: {}\n", printable(text));
}

}  // namespace kiln
