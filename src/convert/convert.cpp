#include "convert/convert.h"

#include <filesystem>

#include "checkpoint/pt_file.h"
#include "checkpoint/tensor_files.h"
#include "convert/diffusers_folder.h"
#include "convert/dit_architecture.h"
#include "convert/dit_diffusers.h"
#include "convert/weights_source.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "models/registry.h"

namespace kiln {
namespace {

enum class Target { kPt, kSafetensors, kDiffusers };

Target target_of(const std::string& out) {
  const std::string extension = std::filesystem::path(out).extension().string();
  if (extension == ".pt" || extension == ".pth") return Target::kPt;
  if (extension == ".safetensors") return Target::kSafetensors;
  if (extension == ".bin" || extension == ".ckpt" || extension == ".npz")
    fail("convert", "--out {}: expected *.pt, *.safetensors or a folder", out);
  return Target::kDiffusers;
}

struct Loaded {
  TensorMap weights;                // published keys where the architecture is known
  std::optional<DitConfig> config;  // nullopt: not a DiT
  bool num_heads_assumed = false;   // neither given nor told by a published width
};

Loaded load(const ConvertOptions& options, const WeightsSource& source) {
  Loaded loaded;
  loaded.weights = load_tensors(source.path, options.ema);
  if (!source.dit_diffusers.is_null()) {
    loaded.config = parse_dit_diffusers_config(source.dit_diffusers, source.path);
    loaded.weights = dit_from_diffusers(*loaded.config, loaded.weights, source.path);
    return loaded;
  }
  ShapeMap shapes;
  for (const auto& [key, tensor] : loaded.weights) shapes[key] = tensor.sizes().vec();
  DitHints hints = dit_hints(source.run);
  if (options.input_size) hints.input_size = options.input_size;
  if (options.num_heads) hints.num_heads = options.num_heads;
  loaded.config = recognise_dit(shapes, hints);
  loaded.num_heads_assumed = loaded.config && !hints.num_heads && dit_name(*loaded.config) == "dit";
  return loaded;
}

// Every key and shape is held against the model before anything is written.
std::string check_architecture(const ConvertOptions& options, const Loaded& loaded,
                               const std::string& source) {
  if (!loaded.config) {
    if (!options.model.empty())
      fail("convert", "{} does not hold a {}: its keys are not DiT's (see kiln inspect)", source,
           options.model);
    return "unknown architecture";
  }
  const std::string name = dit_name(*loaded.config);
  const auto model = build_denoiser("dit", to_json(*loaded.config), {.device = at::kMeta});
  load_weights(*model, loaded.weights, source);
  if (!options.model.empty() && options.model != name && options.model != "dit")
    fail("convert", "{} holds a {}, not a {}", source, name, options.model);
  return name;
}

// What --objective NAME stands for, as far as a scheduler needs it.
nlohmann::json objective_of(const std::string& name) {
  if (name == "iddpm" || name == "flow") return {{"type", name}};
  if (name == "x_0") return {{"type", "ddpm"}, {"prediction_type", "sample"}};
  if (name == "epsilon" || name == "v_prediction") return {{"type", "ddpm"}, {"prediction_type", name}};
  fail("convert", "expected --objective to be one of iddpm, epsilon, v_prediction, x_0, flow, got \"{}\"",
       name);
}

DiffusersFolderOptions folder_options(const ConvertOptions& options, const nlohmann::json& run) {
  DiffusersFolderOptions result{.vae = options.vae};
  if (!options.objective.empty())
    result.objective = objective_of(options.objective);
  else if (run.is_object() && run.contains("objective"))
    result.objective = run["objective"];
  if (run.is_object() && run.contains("class_names")) result.class_names = run["class_names"];
  return result;
}

std::map<std::string, std::string> metadata_of(const Loaded& loaded) {
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  if (!loaded.config) return metadata;
  nlohmann::json config = to_json(*loaded.config);
  if (loaded.num_heads_assumed) config.erase("num_heads");  // a guess must not come back as knowledge
  metadata[kModelConfigKey] = config.dump();
  return metadata;
}

void write_pt_file(const std::string& path, const TensorMap& weights) {
  std::vector<NamedTensor> views;
  std::vector<at::Tensor> kept;  // what the views point into
  for (const auto& [name, tensor] : weights) {
    kept.push_back(tensor.contiguous());
    views.push_back({name,
                     {from_scalar_type(tensor.scalar_type()),
                      tensor.sizes().vec(),
                      {static_cast<const std::byte*>(kept.back().const_data_ptr()), kept.back().nbytes()}}});
  }
  write_pt(path, {{"", std::move(views)}});
}

}  // namespace

void convert(const ConvertOptions& options) {
  const Target target = target_of(options.out);
  if (target != Target::kDiffusers && !options.vae.empty())
    fail("convert", "--vae has no effect on {}: it needs a diffusers folder as --out", options.out);
  const WeightsSource source = find_weights(options.in, options.ema);
  Loaded loaded = load(options, source);
  const std::string name = check_architecture(options, loaded, source.path);
  if (!options.dtype.empty()) {
    const at::ScalarType dtype = parse_compute_dtype(options.dtype, "--dtype");
    for (auto& [key, tensor] : loaded.weights)
      if (tensor.is_floating_point()) tensor = tensor.to(dtype);
  }
  switch (target) {
    case Target::kPt:
      write_pt_file(options.out, loaded.weights);
      break;
    case Target::kSafetensors:
      save_tensors(options.out, loaded.weights, metadata_of(loaded));
      break;
    case Target::kDiffusers:
      if (!loaded.config)
        fail("convert", "{} is not a DiT: only DiT is written as a diffusers folder", source.path);
      write_dit_pipeline(options.out, *loaded.config, loaded.weights, folder_options(options, source.run));
      if (options.vae.empty())
        fmt::print("no --vae was given: pass one to DiTPipeline.from_pretrained(..., vae=...)\n");
      if (loaded.config->num_classes != 1000)
        fmt::print(
            "DiTPipeline itself guides with class 1000 as the null class: with {} classes, call it with "
            "guidance_scale=1 or use the transformer alone\n",
            loaded.config->num_classes);
      break;
  }
  if (loaded.num_heads_assumed)
    fmt::print("num_heads {} is assumed from the width: give --num-heads if the model has another number\n",
               loaded.config->num_heads);
  fmt::print("{}: {}, {} tensors, from {}\n", options.out, name, loaded.weights.size(), source.path);
}

}  // namespace kiln
