#include "convert/weights_source.h"

#include <filesystem>
#include <fstream>

#include "checkpoint/checked_files.h"
#include "checkpoint/weights_file.h"
#include "core/error.h"
#include "models/registry.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

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

// `folder`: RUN/checkpoints/step-00001000
void add_run(const fs::path& folder, WeightsSource& source) {
  source.step = folder_name(folder);
  const fs::path config = fs::weakly_canonical(folder).parent_path().parent_path() / "config.json";
  if (fs::exists(config)) source.run = read_json(config.string());
}

std::string weights_file_of(const fs::path& folder, bool prefer_ema) {
  const std::string path = prefer_ema ? first_existing(folder, {"ema.safetensors", "model.safetensors"})
                                      : first_existing(folder, {"model.safetensors", "ema.safetensors"});
  if (path.empty()) fail("weights", "no model.safetensors in the checkpoint {}", folder.string());
  return path;
}

WeightsSource checkpoint_weights(const fs::path& folder, const std::string& path) {
  WeightsSource source;
  source.path = path;
  add_run(folder, source);
  return source;
}

WeightsSource run_weights(const std::string& run, bool prefer_ema) {
  const std::string path = newest_checked_file(
      run, [&](const std::string& folder) { return weights_file_of(folder, prefer_ema); });
  if (path.empty()) fail("weights", "no complete checkpoint yet in {}", run);
  return checkpoint_weights(fs::path(path).parent_path(), path);
}

// Returns what `kiln convert` left in a safetensors file, or null if there is nothing.
nlohmann::json run_of_metadata(const std::string& path) {
  if (tensor_file_format(path) != TensorFileFormat::kSafetensors) return {};
  const auto metadata = open_safetensors(path)->metadata();
  const auto found = metadata.find(kModelConfigKey);
  if (found == metadata.end()) return {};
  const auto config = nlohmann::json::parse(found->second, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object())
    fail("weights", "metadata \"{}\" is not a JSON object ({})", kModelConfigKey, path);
  return {{"model_config", config}};
}

WeightsSource file_weights(const fs::path& file) {
  WeightsSource source;
  source.path = file.string();
  const fs::path folder = fs::weakly_canonical(file).parent_path();
  if (is_checkpoint_name(folder.filename().string())) add_run(folder, source);
  if (source.run.is_null()) source.run = run_of_metadata(source.path);
  return source;
}

WeightsSource diffusers_weights(const fs::path& folder) {
  WeightsSource source;
  source.path = first_existing(
      folder, {"diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json",
               "model.safetensors", "model.safetensors.index.json", "diffusion_pytorch_model.bin"});
  if (source.path.empty())
    fail("weights", "no weights in the folder {}: expected a run, a checkpoint or a diffusers folder",
         folder.string());
  if (!fs::exists(folder / "config.json")) return source;
  const nlohmann::json config = read_json((folder / "config.json").string());
  if (config.is_object() && config.value("_class_name", nlohmann::json()).is_string() &&
      foreign_family(config["_class_name"]).family)
    source.foreign = config;
  return source;
}

}  // namespace

nlohmann::json read_json(const std::string& path) {
  std::ifstream stream(path);
  if (!stream) fail("weights", "cannot open {}", path);
  try {
    return nlohmann::json::parse(stream);
  } catch (const nlohmann::json::exception& error) {
    fail("weights", "{} is not valid JSON: {}", path, error.what());
  }
}

nlohmann::json model_config_of(const WeightsSource& source) {
  if (!source.run.is_object() || !source.run.contains("model_config")) return nlohmann::json::object();
  const nlohmann::json& config = source.run["model_config"];
  if (!config.is_object())
    fail("weights", "the model_config beside {} is not a JSON object: {}", source.path, config.type_name());
  return config;
}

WeightsSource find_weights(const std::string& path, bool prefer_ema) {
  if (!fs::exists(path)) fail("weights", "{} does not exist", path);
  const fs::path folder = path;
  if (!fs::is_directory(folder)) return file_weights(path);
  if (fs::exists(folder / "store.json"))
    fail("weights", "{} is a feature store, not weights: see kiln store inspect", path);
  for (const char* component : {"transformer", "unet"})  // of a pipeline
    if (fs::is_directory(folder / component)) return diffusers_weights(folder / component);
  if (fs::is_directory(folder / "checkpoints")) return run_weights(path, prefer_ema);
  if (is_checkpoint_name(folder_name(folder)))
    return checkpoint_weights(folder, weights_file_of(folder, prefer_ema));
  return diffusers_weights(folder);
}

}  // namespace kiln
