#include "convert/diffusers_folder.h"

#include <filesystem>

#include "checkpoint/tensor_files.h"
#include "convert/weights_source.h"
#include "core/error.h"
#include "core/files/atomic_file.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// The oldest version whose DiTTransformer2DModel is a class of its own.
constexpr const char* kDiffusersVersion = "0.30.0";

json scheduler_config(const json& objective) {
  const std::string type = objective.value("type", "");
  const int64_t num_train_timesteps = objective.value("num_train_timesteps", int64_t{1000});
  if (type == "flow")
    return {{"_class_name", "FlowMatchEulerDiscreteScheduler"},
            {"num_train_timesteps", num_train_timesteps},
            {"shift", objective.value("shift", 1.0)}};
  if (type != "iddpm" && type != "ddpm")
    fail("convert", "no diffusers scheduler fits an objective of type {:?}", type);
  return {{"_class_name", "DDIMScheduler"},
          {"num_train_timesteps", num_train_timesteps},
          {"beta_start", objective.value("beta_start", 0.0001)},
          {"beta_end", objective.value("beta_end", 0.02)},
          {"beta_schedule", objective.value("beta_schedule", "linear")},
          {"clip_sample", false},
          {"set_alpha_to_one", true},
          {"steps_offset", 0},
          {"prediction_type", objective.value("prediction_type", "epsilon")}};
}

void write_json(const fs::path& path, json content) {
  content["_diffusers_version"] = kDiffusersVersion;
  write_file_atomically("convert", path.string(), content.dump(2) + "\n");
}

void copy_vae(const fs::path& from, const fs::path& to, const char* class_name) {
  const fs::path source = fs::is_directory(from / "vae") ? from / "vae" : from;
  const json config = read_json((source / "config.json").string());
  if (!config.is_object() || config.value("_class_name", json()) != class_name)
    fail("convert", "--vae {}: expected the folder of an {}", from.string(), class_name);
  fs::create_directory(to);
  fs::copy(source / "config.json", to / "config.json");
  bool has_weights = false;
  for (const auto& entry : fs::directory_iterator(source)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("diffusion_pytorch_model")) continue;
    fs::copy(entry.path(), to / name);
    has_weights = true;
  }
  if (!has_weights) fail("convert", "--vae {}: no diffusion_pytorch_model.safetensors in it", from.string());
}

void write_parts(const fs::path& folder, const ForeignFormat& format, const json& config,
                 const TensorMap& weights, const DiffusersFolderOptions& options) {
  const json scheduler = scheduler_config(options.objective);
  const TensorMap model = format.weights_to(config, weights);
  const fs::path component = folder / format.component;
  fs::create_directories(component);
  write_json(component / "config.json", format.config_to(config));
  save_tensors((component / "diffusion_pytorch_model.safetensors").string(), model, {{"format", "pt"}});
  fs::create_directory(folder / "scheduler");
  write_json(folder / "scheduler" / "scheduler_config.json", scheduler);
  json index = {{"_class_name", format.pipeline(config)},
                {"scheduler", {"diffusers", scheduler["_class_name"]}},
                {format.component, {"diffusers", format.class_name}}};
  for (const char* component : format.absent) index[component] = {nullptr, nullptr};
  if (!options.vae.empty()) {
    copy_vae(options.vae, folder / "vae", format.autoencoder);
    index["vae"] = {"diffusers", format.autoencoder};
  }
  for (std::size_t i = 0; i < options.class_names.size(); ++i)
    index["id2label"][std::to_string(i)] = options.class_names[i];
  write_json(folder / "model_index.json", index);
}

}  // namespace

void write_diffusers_pipeline(const std::string& folder, const ForeignFormat& format, const json& config,
                              const TensorMap& weights, const DiffusersFolderOptions& options) {
  if (fs::exists(folder)) fail("convert", "{} exists: remove it or choose another --out", folder);
  fs::path target = folder;
  if (!target.has_filename()) target = target.parent_path();  // given with a trailing slash
  try {
    if (target.has_parent_path()) fs::create_directories(target.parent_path());
    AtomicFolder written("convert", target.string());
    write_parts(written.folder(), format, config, weights, options);
    written.commit();
  } catch (const fs::filesystem_error& error) {
    fail("convert", "cannot write {}: {}", target.string(), error.code().message());
  }
}

}  // namespace kiln
