#include "convert/weights_source.h"

#include <filesystem>
#include <fstream>

#include "checkpoint/train_state.h"
#include "core/error.h"

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

WeightsSource checkpoint_weights(const fs::path& folder, bool prefer_ema) {
  WeightsSource source;
  source.path = prefer_ema ? first_existing(folder, {"ema.safetensors", "model.safetensors"})
                           : first_existing(folder, {"model.safetensors", "ema.safetensors"});
  if (source.path.empty()) fail("weights", "no model.safetensors in the checkpoint {}", folder.string());
  source.step = folder.filename().string();
  if (fs::exists(folder / "train_state.json")) source.config = read_train_state(folder.string()).config;
  return source;
}

WeightsSource run_weights(const std::string& run, bool prefer_ema) {
  const auto checkpoints = list_checkpoints(run);
  if (checkpoints.empty()) fail("weights", "no complete checkpoint yet in {}", run);
  return checkpoint_weights(checkpoints.back().folder, prefer_ema);
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

WeightsSource find_weights(const std::string& path, bool prefer_ema) {
  if (!fs::exists(path)) fail("weights", "{} does not exist", path);
  const fs::path folder = path;
  WeightsSource source;
  source.path = path;
  if (!fs::is_directory(folder)) return source;
  if (fs::exists(folder / "store.json"))
    fail("weights", "{} is a feature store, not weights: see kiln store inspect", path);
  if (fs::is_directory(folder / "transformer"))
    return find_weights((folder / "transformer").string(), prefer_ema);
  if (fs::is_directory(folder / "checkpoints")) return run_weights(path, prefer_ema);
  fs::path named = folder;
  if (!named.has_filename()) named = named.parent_path();  // given with a trailing slash
  if (is_checkpoint_name(named.filename().string())) return checkpoint_weights(named, prefer_ema);

  source.path = first_existing(
      folder, {"diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json",
               "model.safetensors", "model.safetensors.index.json", "diffusion_pytorch_model.bin"});
  if (source.path.empty())
    fail("weights", "no weights in the folder {}: expected a run, a checkpoint or a diffusers folder", path);
  if (fs::exists(folder / "config.json")) {
    source.config = read_json((folder / "config.json").string());
    if (source.config.is_object() && source.config.value("_class_name", "") == "DiTTransformer2DModel")
      source.kind = WeightsSource::Kind::kDiffusersTransformer;
  }
  return source;
}

}  // namespace kiln
