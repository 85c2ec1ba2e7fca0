#include "convert/convert.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include "checkpoint/tensor_files.h"
#include "checkpoint/weights_file.h"
#include "convert/diffusers_folder.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/json_config.h"
#include "core/tensors.h"
#include "diffusion/sampler.h"
#include "models/load_model.h"
#include "models/model_record.h"
#include "models/piece_checks.h"
#include "models/registry.h"
#include "models/weights_source.h"
#include "run/published_settings.h"

namespace kiln {

namespace {

using nlohmann::json;

enum class Target { kPt, kSafetensors, kDiffusers };

Target target_of(const std::string& out) {
  const std::string extension = std::filesystem::path(out).extension().string();
  if (extension == ".pt" || extension == ".pth") return Target::kPt;
  if (extension == ".safetensors") return Target::kSafetensors;
  if (extension == ".bin" || extension == ".ckpt" || extension == ".npz")
    fail("convert", "--out {}: expected *.pt, *.safetensors or a folder", out);
  return Target::kDiffusers;
}

// Checks every key and shape against the model before anything is written.
void check_architecture(const ConvertOptions& options, const LoadedModel& loaded, const std::string& source) {
  if (!loaded.family) {
    if (!options.model.empty())
      fail("convert", "{} does not hold a {}: no known model has its keys (see kiln inspect)", source,
           options.model);
    return;
  }
  const auto model = loaded.family->build(loaded.model.config, {.device = at::kMeta});
  load_weights(*model, loaded.weights, source);
  const std::string name = preset_name(*loaded.family, loaded.model.config);
  if (!options.model.empty() && options.model != name && options.model != loaded.family->name)
    fail("convert", "{} holds a {}, not a {}", source, name, options.model);
}

// Returns the config overrides that the options stand for. Only the record tells an autoencoder's scale.
json config_of(const ConvertOptions& options, const WeightsSource& source) {
  json config = read_json_option("convert", "--model-config", options.model_config);
  if (options.input_size) config["input_size"] = *options.input_size;
  if (options.num_heads) config["num_heads"] = *options.num_heads;
  if (options.image_size == 0) return config;
  const Family* const family = family_of_weights(source, options.ema, config);
  if (!family) fail("convert", "--image-size: {} is of an unknown architecture", source.path);
  const int64_t downsample = pixels_of_latent(source.record.autoencoder, *family);
  if (options.image_size < downsample || options.image_size % downsample != 0)
    fail("convert", "expected --image-size to be a multiple of {}, got {}", downsample, options.image_size);
  config[family->size_key] = options.image_size / downsample;
  return config;
}

// Returns what the output says of itself. A guess is not written, so that it never comes back as knowledge.
// `given`: config_of().
ModelRecord record_for(const ConvertOptions& options, const json& given, const WeightsSource& source,
                       const LoadedModel& loaded) {
  ModelRecord record = source.record;
  record.model = loaded.name;
  record.model_config = loaded.model.config;
  for (const std::string& key : loaded.model.assumed) record.model_config.erase(key);
  record.objective = objective_of(source.record, source.scheduler, loaded.name,
                                  {.name = options.objective, .flow_shift = options.flow_shift});
  if (record.objective.is_object() && !record.drawing.sampler.empty() &&
      !samples(record.drawing.sampler, record.objective))
    record.drawing.sampler.clear();
  if (!loaded.has_null_rows) record.drawing.unconditional = "empty_caption";
  if (options.image_size > 0)
    record.image_size = options.image_size;
  else if (record.image_size > 0 && given.contains(loaded.family->size_key))
    record.image_size = loaded.model.config[loaded.family->size_key].get<int64_t>() *
                        pixels_of_latent(source.record.autoencoder, *loaded.family);
  record.adapter = {};
  return record;
}

// Returns the record as one file has it: pieces that stay behind in a pipeline's folder keep their names.
ModelRecord record_of_file(ModelRecord record, const WeightsSource& source) {
  if (!source.recorded_autoencoder.empty()) record.autoencoder.path = source.recorded_autoencoder;
  if (!source.recorded_text_encoder.empty()) record.text.encoder_path = source.recorded_text_encoder;
  return record;
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

// Returns the components of a diffusers folder: those that are given, and where the command says how they go
// in, those that the record names.
DiffusersFolderOptions folder_options(const ConvertOptions& options, const ModelRecord& record) {
  const std::string& how = options.components;
  if (how == "none") return {};
  if (!how.empty() && how != "link" && how != "copy")
    fail("convert", "expected --components to be one of copy, link, none, got \"{}\"", how);
  DiffusersFolderOptions result{.autoencoder = options.autoencoder,
                                .text_encoder = options.text_encoder,
                                .links = how == "link",
                                .anyway = options.anyway};
  const auto find = [](std::string& path, const std::string& recorded, const char* option) {
    if (!path.empty()) return;
    std::error_code unreachable;
    if (recorded.empty() || !std::filesystem::exists(recorded, unreachable))
      fail("convert", "--components: {}: give {} PATH, or leave out --components",
           recorded.empty() ? "the record names no folder" : recorded + " does not exist", option);
    path = recorded;
  };
  if (how.empty()) return result;
  if (record.autoencoder.name != "pixels") find(result.autoencoder, record.autoencoder.path, "--vae");
  if (!record.text.encoder.empty()) find(result.text_encoder, record.text.encoder_path, "--text-encoder");
  return result;
}

void write_diffusers(const ConvertOptions& options, const LoadedModel& loaded, const ModelRecord& record,
                     const WeightsSource& source) {
  if (!loaded.family || loaded.family->formats.empty())
    fail("convert", "{} is of an architecture that has no diffusers folder here: give --out *.safetensors",
         source.path);
  const ModelRecord known = record_of_file(record, source);
  ModelRecord settled = known;
  if (known.objective.is_null()) {
    settled.objective = published_objective_config(loaded.name, "");
    fmt::print("nothing says how the weights were trained: the scheduler is that of the published {}\n",
               loaded.name);
  }
  settled.model_config = loaded.model.config;
  settled.drawing = drawing_info(
      drawing_of(settled, settled.objective),
      loaded.family->build(loaded.model.config, {.device = at::kMeta, .outline = true})->shape());
  if (!known.drawing.unconditional.empty()) settled.drawing.unconditional = known.drawing.unconditional;
  const DiffusersFolder written =
      write_diffusers_pipeline(options.out, loaded.family->formats.front(), known, settled, loaded.weights,
                               folder_options(options, record));
  if (!written.limit.empty())
    fmt::print("{} draws other pictures than Kiln ({}): README.md has code that draws Kiln's\n",
               written.pipeline, written.limit);
  if (written.has_null_rows)
    fmt::print("{} holds the null rows, which diffusers' class has no place for\n", kNullRowsFile);
  if (!written.missing.empty())
    fmt::print("the folder lacks {}, which README.md names: --components copy puts it in\n", written.missing);
}

namespace fs = std::filesystem;

bool is_record(const std::string& path) try {
  if (!fs::exists(path)) return false;
  const nlohmann::json document = read_json(path);
  return document.is_object() && document.contains("model") && document.contains("model_config");
} catch (const Error&) {
  return false;
}

// True for a safetensors file with a record, or a .pt file with one in FILE.json.
bool is_of_kiln(const std::string& path) {
  try {
    return tensor_file_format(path) == TensorFileFormat::kSafetensors
               ? record_of(open_safetensors(path)->metadata(), path).has_value()
               : is_record(path + ".json");
  } catch (const Error&) {
    return false;
  }
}

[[noreturn]] void refuse(const std::string& path) {
  fail("convert", "{} exists and kiln convert did not write it: choose another --out, or give --overwrite",
       path);
}

}  // namespace

void convert(const ConvertOptions& options) {
  const Target target = target_of(options.out);
  for (const auto& [option, given] :
       {std::pair("vae", options.autoencoder), {"text-encoder", options.text_encoder}}) {
    if (given.empty()) continue;
    if (target != Target::kDiffusers)
      fail("convert", "--{} has no effect on {}: it needs a diffusers folder as --out", option, options.out);
    if (!std::filesystem::exists(given)) fail("convert", "--{} {} does not exist", option, given);
  }
  if (target != Target::kDiffusers) check_replaceable(options.out, options.overwrite);
  WeightsSource source = find_weights(options.in, {.ema = options.ema});
  if (is_run_adapter(source)) {
    if (!options.merge.empty() || !options.autoencoder.empty() || !options.model.empty() ||
        !options.objective.empty())
      fail("convert", "{} holds an adapter: --merge, --vae, --model and --objective are for models",
           source.path);
    return write_run_adapter(source, options.out, options.adapter_format, options.dtype, options.overwrite);
  }
  if (!options.adapter_format.empty())
    fail("convert", "--adapter-format is for runs that trained an adapter: {} is a model", options.in);
  std::optional<FoundAdapter> merged;
  if (!options.merge.empty()) {
    merged = find_adapter(options.merge, options.ema);
    source.record = record_with_adapter(source.record, *merged);
  }
  const json config = config_of(options, source);
  LoadedModel loaded = load_model(source, {.ema = options.ema, .config = config});
  check_architecture(options, loaded, source.path);
  const ModelRecord record = loaded.family ? record_for(options, config, source, loaded) : ModelRecord{};
  if (merged) {
    const TensorMap base = loaded.weights;
    const size_t num_layers = merge_found_adapter(*merged, options.anyway, loaded);
    fmt::print("{}: an adapter of {} layers, merged\n", options.merge, num_layers);
    if (options.dtype.empty())  // the file has the base's dtypes
      for (auto& [key, tensor] : loaded.weights) tensor = tensor.to(base.at(key).scalar_type());
  }
  if (!options.dtype.empty()) {
    const at::ScalarType dtype = parse_compute_dtype(options.dtype, "--dtype");
    for (auto& [key, tensor] : loaded.weights)
      if (tensor.is_floating_point()) tensor = tensor.to(dtype);
  }
  switch (target) {
    case Target::kPt:
      // First what says that the file is Kiln's: if the weights then fail, the same command replaces it.
      if (loaded.family)
        write_file_atomically("convert", options.out + ".json",
                              metadata_of(record_of_file(record, source)).at(kRecordKey) + "\n");
      write_pt_file(options.out, loaded.weights);
      if (loaded.family)
        fmt::print("{}.json says what the weights are and how they draw: keep the two files together\n",
                   options.out);
      break;
    case Target::kSafetensors:
      save_tensors(options.out, loaded.weights, metadata_of(record_of_file(record, source)));
      break;
    case Target::kDiffusers:
      write_diffusers(options, loaded, record, source);
      break;
  }
  for (const std::string& key : loaded.model.assumed)
    fmt::print("{} {} is assumed from the shapes: give it if the model has another\n", key,
               loaded.model.config[key].dump());
  if (!loaded.has_null_rows)
    fmt::print(
        "{} has no null rows: its record says that guidance moves away from the encoder's empty caption\n",
        source.path);
  fmt::print("{}: {}, {} tensors, from {}\n", options.out,
             loaded.family ? preset_name(*loaded.family, loaded.model.config) : "unknown architecture",
             loaded.weights.size(), source.path);
}

void check_replaceable(const std::string& path, bool overwrite) {
  if (overwrite) return;
  if (fs::exists(path)) {
    if (!is_of_kiln(path)) refuse(path);
  } else if (fs::path(path).extension() != ".safetensors" && fs::exists(path + ".json") &&
             !is_record(path + ".json")) {
    refuse(path + ".json");
  }
}

void check_replaceable(const std::string& path, const std::string& content, bool overwrite) {
  if (overwrite || !fs::exists(path)) return;
  std::ifstream file(path, std::ios::binary);
  if (std::string(std::istreambuf_iterator<char>(file), {}) != content) refuse(path);
}

}  // namespace kiln
