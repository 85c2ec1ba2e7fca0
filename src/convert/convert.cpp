#include "convert/convert.h"

#include <filesystem>

#include "checkpoint/pt_file.h"
#include "checkpoint/tensor_files.h"
#include "convert/diffusers_folder.h"
#include "convert/run_adapter.h"
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
  TensorMap weights;               // published keys where the architecture is known
  const Family* family = nullptr;  // null: unknown
  RecognisedModel model{};
};

std::string name_of(const Loaded& loaded) { return preset_name(*loaded.family, loaded.model.config); }

Loaded load(const ConvertOptions& options, const WeightsSource& source) {
  Loaded loaded;
  loaded.weights = load_tensors(source.path, options.ema);
  if (!source.foreign.is_null()) {
    const auto [family, format] = foreign_family(source.foreign["_class_name"]);
    loaded.family = family;
    loaded.model.config = format->config_from(source.foreign, source.path);
    loaded.weights = format->weights_from(loaded.model.config, loaded.weights, source.path);
    return loaded;
  }
  WeightShapes shapes;
  for (const auto& [key, tensor] : loaded.weights) shapes[key] = tensor.sizes().vec();
  nlohmann::json hints = model_config_of(source);
  if (options.input_size) hints["input_size"] = *options.input_size;
  if (options.num_heads) hints["num_heads"] = *options.num_heads;
  if (auto found = recognise_denoiser(shapes, hints)) {
    loaded.family = found->family;
    loaded.model = std::move(found->model);
    loaded.weights = model_weights(*loaded.family, loaded.model.config, loaded.weights, source.path);
    // The name of a published model settles what shapes leave open.
    if (name_of(loaded) != loaded.family->name) loaded.model.assumed.clear();
  }
  return loaded;
}

// Checks every key and shape against the model before anything is written. Returns the model's name.
std::string check_architecture(const ConvertOptions& options, const Loaded& loaded,
                               const std::string& source) {
  if (!loaded.family) {
    if (!options.model.empty())
      fail("convert", "{} does not hold a {}: no known model has its keys (see kiln inspect)", source,
           options.model);
    return "unknown architecture";
  }
  const std::string name = name_of(loaded);
  const auto model = loaded.family->build(loaded.model.config, {.device = at::kMeta});
  load_weights(*model, loaded.weights, source);
  if (!options.model.empty() && options.model != name && options.model != loaded.family->name)
    fail("convert", "{} holds a {}, not a {}", source, name, options.model);
  return name;
}

// Returns the config that --objective NAME stands for, as far as a scheduler needs it.
nlohmann::json objective_of(const std::string& name) {
  if (name == "iddpm" || name == "flow") return {{"type", name}};
  if (name == "x_0") return {{"type", "ddpm"}, {"prediction_type", "sample"}};
  if (name == "epsilon" || name == "v_prediction") return {{"type", "ddpm"}, {"prediction_type", name}};
  fail("convert", "expected --objective to be one of iddpm, epsilon, v_prediction, x_0, flow, got \"{}\"",
       name);
}

DiffusersFolderOptions folder_options(const ConvertOptions& options, const nlohmann::json& run,
                                      const ForeignFormat& format) {
  DiffusersFolderOptions result{.vae = options.vae, .objective = nlohmann::json::parse(format.objective)};
  if (!options.objective.empty()) {
    // It keeps the published schedule if that is of its kind, as in training and sampling.
    const nlohmann::json asked = objective_of(options.objective);
    if (result.objective.value("type", "") == asked.at("type"))
      result.objective.update(asked);
    else
      result.objective = asked;
  } else if (run.is_object() && run.contains("objective"))
    result.objective = run["objective"];
  if (run.is_object() && run.contains("class_names")) result.class_names = run["class_names"];
  return result;
}

std::map<std::string, std::string> metadata_of(const Loaded& loaded) {
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  if (!loaded.family) return metadata;
  nlohmann::json config = loaded.model.config;
  for (const std::string& key : loaded.model.assumed) config.erase(key);  // no guess comes back as knowledge
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

void write_diffusers(const ConvertOptions& options, const Loaded& loaded, const WeightsSource& source) {
  if (!loaded.family || loaded.family->formats.empty())
    fail("convert", "{} is of an architecture that has no diffusers folder here: give --out *.safetensors",
         source.path);
  const ForeignFormat& format = loaded.family->formats.front();
  write_diffusers_pipeline(options.out, format, loaded.model.config, loaded.weights,
                           folder_options(options, source.run, format));
  if (options.vae.empty())
    fmt::print("no --vae was given: pass one to {}.from_pretrained(..., vae=...)\n",
               format.pipeline(loaded.model.config));
}

}  // namespace

void convert(const ConvertOptions& options) {
  const Target target = target_of(options.out);
  if (target != Target::kDiffusers && !options.vae.empty())
    fail("convert", "--vae has no effect on {}: it needs a diffusers folder as --out", options.out);
  const WeightsSource source = find_weights(options.in, options.ema);
  if (is_run_adapter(source)) {
    if (!options.merge.empty() || !options.vae.empty() || !options.model.empty() ||
        !options.objective.empty())
      fail("convert", "{} holds an adapter: --merge, --vae, --model and --objective are for models",
           source.path);
    return write_run_adapter(source, options.out, options.adapter_format, options.dtype);
  }
  if (!options.adapter_format.empty())
    fail("convert", "--adapter-format is for runs that trained an adapter: {} is a model", options.in);
  Loaded loaded = load(options, source);
  const std::string name = check_architecture(options, loaded, source.path);
  if (!options.merge.empty())
    merge_given_adapter(options.merge, options.ema, {loaded.family, loaded.model.config}, loaded.weights);
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
      write_diffusers(options, loaded, source);
      break;
  }
  for (const std::string& key : loaded.model.assumed)
    fmt::print("{} {} is assumed from the shapes: give it if the model has another\n", key,
               loaded.model.config[key].dump());
  fmt::print("{}: {}, {} tensors, from {}\n", options.out, name, loaded.weights.size(), source.path);
}

}  // namespace kiln
