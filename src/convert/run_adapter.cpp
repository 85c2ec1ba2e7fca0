#include "convert/convert.h"

#include <fmt/format.h>

#include <filesystem>

#include "checkpoint/tensor_files.h"
#include "core/aten.h"
#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/tensors.h"
#include "models/lora_keys.h"
#include "models/registry.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

LoraFormat format_of(const std::string& name, bool is_file) {
  if (name == "peft" || (name.empty() && !is_file)) return LoraFormat::kPeft;
  if (name == "diffusers" || name.empty()) return LoraFormat::kDiffusers;
  if (name == "kohya") return LoraFormat::kKohya;
  fail("convert", "expected --adapter-format to be one of peft, diffusers, kohya, got \"{}\"", name);
}

// Returns the folder of a pipeline that holds the run's model. diffusers' keys begin with its name.
std::string component_of(const WeightsSource& source) {
  const Family& family = family_of(source.record.model);
  return family.formats.empty() ? "transformer" : family.formats.front().component;
}

// Returns where an adapter's tensors go. PEFT and diffusers find them in a folder by these names.
fs::path file_in(const fs::path& out, bool is_file, LoraFormat format) {
  if (is_file) return out;
  return out /
         (format == LoraFormat::kPeft ? "adapter_model.safetensors" : "pytorch_lora_weights.safetensors");
}

// Returns the metadata of an adapter's file: which base it is of.
std::map<std::string, std::string> adapter_metadata(ModelRecord record) {
  record.adapter.config = nullptr;  // the file's own keys or adapter_config.json say the scale
  std::map<std::string, std::string> metadata = metadata_of(record);
  metadata["modelspec.architecture"] += "/lora";
  return metadata;
}

}  // namespace

bool is_run_adapter(const WeightsSource& source) { return !source.record.adapter.config.is_null(); }

void write_run_adapter(const WeightsSource& source, const std::string& to, const std::string& format_name,
                       const std::string& dtype_name, bool overwrite) {
  std::vector<LoraLayer> layers =
      lora_layers(load_tensors(source.path), source.record.adapter.config, source.path);
  if (!dtype_name.empty()) {
    const at::ScalarType dtype = parse_compute_dtype(dtype_name, "--dtype");
    for (LoraLayer& layer : layers) {
      layer.down = layer.down.to(dtype);
      layer.up = layer.up.to(dtype);
    }
  }
  const fs::path out = to;
  const bool is_file = out.extension() == ".safetensors";
  if (!is_file && out.has_extension())
    fail("convert", "--out {}: an adapter goes to *.safetensors or a folder", to);
  const LoraFormat format = format_of(format_name, is_file);
  const LoraFile file = write_lora(layers, format, component_of(source));
  const fs::path path = file_in(out, is_file, format);
  const std::string config_path = (path.parent_path() / "adapter_config.json").string();
  const std::string config = file.adapter_config.dump(2) + "\n";
  check_replaceable(path.string(), overwrite);
  // That of PEFT's adapter_model.safetensors belongs to it.
  const bool has_own_config = !is_file && fs::exists(path);
  if (format == LoraFormat::kPeft && !has_own_config) check_replaceable(config_path, config, overwrite);
  if (!is_file) fs::create_directories(out);
  save_tensors(path.string(), file.tensors, adapter_metadata(source.record));
  if (format == LoraFormat::kPeft) write_file_atomically("convert", config_path, config);
  fmt::print("{}: an adapter of {} layers, from {}\n", path.string(), layers.size(), source.path);
}

}  // namespace kiln
