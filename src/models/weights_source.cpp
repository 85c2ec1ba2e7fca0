#include "models/weights_source.h"

#include <charconv>
#include <filesystem>
#include <initializer_list>
#include <utility>

#include "checkpoint/train_state.h"
#include "checkpoint/weights_file.h"
#include "core/error.h"
#include "core/text/json_text.h"
#include "models/model_record.h"
#include "models/registry.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kEmaFile = "ema.safetensors";

std::string first_existing(const fs::path& folder, std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (fs::exists(folder / name)) return (folder / name).string();
  return "";
}

bool is_checkpoint_name(const std::string& name) {
  return name.starts_with("step-") && name.size() > 5 && name.find_first_not_of("0123456789", 5) == name.npos;
}

// Returns the folder's own name, also when it was given with a trailing slash.
std::string folder_name(const fs::path& folder) {
  return (folder.has_filename() ? folder : folder.parent_path()).filename().string();
}

// Pieces are recorded by bare names, or by paths that may be gone: they may lie beside the weights, under as
// much of the path as was moved with them (RUN/checkpoints/step-00001000/ema.safetensors).
void find_pieces(const fs::path& folder, ModelRecord& record) {
  std::error_code unreachable;
  for (std::string* path : {&record.autoencoder.path, &record.text.encoder_path, &record.adapter.base_path}) {
    if (fs::path(*path).is_absolute() && fs::exists(*path, unreachable)) continue;
    for (fs::path rest = fs::path(*path).relative_path(); !rest.empty() && rest != ".";
         rest = rest.lexically_relative(*rest.begin()))
      if (fs::exists(folder / rest, unreachable)) {
        *path = (folder / rest).string();
        break;
      }
  }
}

std::string average_of(const fs::path& weights, const ModelRecord& record) {
  const std::string name = weights.filename().string();
  for (size_t i = 0; i < record.ema_decays.size(); ++i)
    if (name == ema_file_name(record.ema_decays, i)) return fmt::format("ema-{}", record.ema_decays[i]);
  return name == kModelFile ? "model" : "";
}

// Returns RUN of RUN/checkpoints/step-00001000.
fs::path run_of(const fs::path& checkpoint) {
  return fs::weakly_canonical(checkpoint.has_filename() ? checkpoint : checkpoint.parent_path())
      .parent_path()
      .parent_path();
}

// Nothing is known of a run without a config.json.
ModelRecord record_of_run(const fs::path& run) {
  const fs::path config = run / "config.json";
  if (!fs::exists(config)) return WeightsSource().record;
  return parse_model_record(read_json(config.string()), config.string());
}

// Returns the record in the state of RUN/checkpoints/step-00001000: the run itself may have gone on to other
// stages. Those of earlier versions have none.
std::optional<ModelRecord> record_in_state(const fs::path& checkpoint) {
  json config;
  try {
    config = read_train_state(checkpoint.string()).config;
  } catch (const Error&) {  // the weights may be whole nonetheless
    return std::nullopt;
  }
  if (!config.is_object() || !config.contains("record")) return std::nullopt;
  return parse_model_record(config["record"], fmt::format("train_state.json of {}", checkpoint.string()));
}

// Returns the record of a checkpoint of `run`, which alone knows where the pieces lie now.
ModelRecord record_of_checkpoint(const fs::path& checkpoint, const fs::path& run) {
  ModelRecord of_run = record_of_run(run);
  std::optional<ModelRecord> own = record_in_state(checkpoint);
  if (!own) return of_run;
  const auto take = [](const std::string& theirs, std::string& path, bool is_same) {
    if (is_same && !theirs.empty()) path = theirs;
  };
  take(of_run.autoencoder.path, own->autoencoder.path,
       of_run.autoencoder.fingerprint == own->autoencoder.fingerprint);
  take(of_run.text.encoder_path, own->text.encoder_path,
       of_run.text.encoder_fingerprint == own->text.encoder_fingerprint);
  take(of_run.adapter.base_path, own->adapter.base_path,
       of_run.adapter.base_fingerprint == own->adapter.base_fingerprint);
  return *own;
}

// Adds what is known of RUN/checkpoints/step-00001000/ema.safetensors.
void add_run(const fs::path& weights, WeightsSource& source) {
  const fs::path folder = fs::weakly_canonical(weights).parent_path(), run = run_of(folder);
  source.step = folder.filename().string();
  source.record = record_of_checkpoint(folder, run);
  source.record.average = average_of(weights, source.record);
  int64_t steps = 0;
  const std::string digits = source.step.substr(std::string_view("step-").size());
  std::from_chars(digits.data(), digits.data() + digits.size(), steps);
  source.record.trained_on["steps"] = steps;
  find_pieces(run, source.record);
  find_pieces(run.parent_path(), source.record);
}

// Chooses among a checkpoint's files.
std::string weights_file_of(const fs::path& folder, const WeightsChoice& choice) {
  const fs::path run = run_of(folder);
  const ModelRecord record = record_of_checkpoint(folder, run);
  if (choice.ema && (choice.ema_decay || !record.ema_decays.empty()))
    return (folder / weights_file_name(run.string(), record, choice.ema, choice.ema_decay)).string();
  std::string path = choice.ema ? first_existing(folder, {kEmaFile, kModelFile})
                                : first_existing(folder, {kModelFile, kEmaFile});
  if (path.empty()) fail("weights", "no {} in the checkpoint {}", kModelFile, folder.string());
  return path;
}

WeightsSource checkpoint_weights(const std::string& path) {
  WeightsSource source;
  source.path = path;
  add_run(path, source);
  return source;
}

WeightsSource newest_weights(const std::string& run, const WeightsChoice& choice) {
  const std::string path =
      newest_checked_file(run, [&](const std::string& folder) { return weights_file_of(folder, choice); });
  if (path.empty()) fail("weights", "{} has no complete checkpoint yet", run);
  return checkpoint_weights(path);
}

// Returns the record in the file's metadata, or in a JSON file beside it. Metadata of earlier versions hold
// the model's config alone.
std::optional<ModelRecord> record_beside(const fs::path& file) {
  std::optional<ModelRecord> inside;
  if (tensor_file_format(file.string()) == TensorFileFormat::kSafetensors)
    inside = record_of(open_safetensors(file.string())->metadata(), file.string());
  if (inside && !inside->model.empty()) return inside;
  for (const fs::path& path : {fs::path(file.string() + ".json"), file.parent_path() / "config.json"}) {
    if (!fs::is_regular_file(path)) continue;
    const json document = read_json(path.string());
    // A config.json may be that of any program.
    if (!document.is_object() || !document.contains("model_config")) continue;
    ModelRecord beside = parse_model_record(document, path.string());
    if (inside) beside.model_config = inside->model_config;
    return beside;
  }
  return inside;
}

std::vector<std::string> class_names_of(const json& index) {
  std::vector<std::string> names;
  const json labels = index.is_object() ? index.value("id2label", json::object()) : json::object();
  for (size_t i = 0; i < labels.size(); ++i) {
    const auto name = labels.find(std::to_string(i));
    if (name == labels.end() || !name->is_string()) return {};
    names.push_back(name->get<std::string>());
  }
  return names;
}

// Adds what the folder around a pipeline's component says.
void add_pipeline(const fs::path& folder, WeightsSource& source) {
  const fs::path index = folder / "model_index.json", scheduler = folder / "scheduler/scheduler_config.json";
  if (!fs::exists(index)) return;
  if (source.record.class_names.empty())
    source.record.class_names = class_names_of(read_json(index.string()));
  if (fs::exists(scheduler)) source.scheduler = read_json(scheduler.string());
  if (fs::exists(folder / "vae"))
    source.recorded_autoencoder = std::exchange(source.record.autoencoder.path, folder.string());
  if (fs::exists(folder / "text_encoder"))
    source.recorded_text_encoder = std::exchange(source.record.text.encoder_path, folder.string());
}

// Returns the weights of a pipeline's component, or of a file that is called like one.
WeightsSource component_weights(const fs::path& file) {
  WeightsSource source;
  source.path = file.string();
  if (auto record = record_beside(file)) source.record = std::move(*record);
  const fs::path folder = fs::weakly_canonical(fs::absolute(file).parent_path());
  const fs::path pipeline = folder.parent_path();
  find_pieces(folder, source.record);
  find_pieces(pipeline, source.record);
  add_pipeline(pipeline, source);
  if (!fs::exists(folder / "config.json")) return source;
  const json config = read_json((folder / "config.json").string());
  if (!config.is_object() || !config.value("_class_name", json()).is_string() ||
      !foreign_family(config["_class_name"]).family)
    return source;
  source.foreign = config;
  if (const fs::path rows = pipeline / kNullRowsFile; fs::exists(rows)) source.null_rows = rows.string();
  return source;
}

WeightsSource file_weights(const fs::path& file) {
  if (file.filename().string().starts_with("diffusion_pytorch_model")) return component_weights(file);
  WeightsSource source;
  source.path = file.string();
  const fs::path folder = fs::weakly_canonical(file).parent_path();
  if (is_checkpoint_name(folder.filename().string())) add_run(file, source);
  if (source.record.model_config.empty())
    if (auto record = record_beside(file)) source.record = std::move(*record);
  // A base may be called as the adapter's own file beside it.
  if (source.step.empty()) find_pieces(folder, source.record);
  return source;
}

WeightsSource folder_weights(const fs::path& folder, const WeightsChoice& choice) {
  const std::string path = first_existing(
      folder, {"diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json",
               choice.ema ? kEmaFile : kModelFile, kModelFile, "model.safetensors.index.json",
               "diffusion_pytorch_model.bin"});
  if (path.empty())
    fail("weights", "no weights in the folder {}: expected a run, a checkpoint or a diffusers folder",
         folder.string());
  return component_weights(path);
}

}  // namespace

json read_json(const std::string& path) { return read_json_file("weights", path); }

WeightsSource find_weights(const std::string& path, const WeightsChoice& choice) {
  if (!fs::exists(path)) fail("weights", "{} does not exist", path);
  const fs::path folder = path;
  if (!fs::is_directory(folder)) return file_weights(path);
  if (fs::exists(folder / "store.json"))
    fail("weights", "{} is a feature store, not weights: see kiln store inspect", path);
  for (const std::string& component : denoiser_components())
    if (fs::is_directory(folder / component)) return folder_weights(folder / component, choice);
  if (fs::is_directory(folder / "checkpoints") || fs::exists(folder / "log.jsonl"))
    return newest_weights(path, choice);
  if (is_checkpoint_name(folder_name(folder))) return checkpoint_weights(weights_file_of(folder, choice));
  return folder_weights(folder, choice);
}

}  // namespace kiln
