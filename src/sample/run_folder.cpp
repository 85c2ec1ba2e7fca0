#include "sample/run_folder.h"

#include <fmt/ranges.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/checked_files.h"
#include "checkpoint/tensor_files.h"
#include "checkpoint/weights_file.h"
#include "core/error.h"
#include "core/files/atomic_file.h"
#include "models/lora.h"

namespace kiln {
namespace {

using nlohmann::json;

std::string info_path(const std::string& run) {
  return (std::filesystem::path(run) / "config.json").string();
}

json to_json(const RunInfo::TextInfo& text) {
  return {{"encoder", text.encoder},
          {"path", text.encoder_path},
          {"fingerprint", text.encoder_fingerprint},
          {"tokenizer_fingerprint", text.tokenizer_fingerprint},
          {"max_tokens", text.max_tokens},
          {"prefix", text.prefix},
          {"suffix", text.suffix},
          {"instruction", text.instruction},
          {"dtype", dtype_name(text.dtype)}};
}

RunInfo::TextInfo text_from_json(const json& document) {
  RunInfo::TextInfo text;
  document.at("encoder").get_to(text.encoder);
  document.at("path").get_to(text.encoder_path);
  document.at("fingerprint").get_to(text.encoder_fingerprint);
  document.at("tokenizer_fingerprint").get_to(text.tokenizer_fingerprint);
  document.at("max_tokens").get_to(text.max_tokens);
  document.at("prefix").get_to(text.prefix);
  document.at("suffix").get_to(text.suffix);
  text.instruction = document.value("instruction", "");  // runs of earlier versions have none
  text.dtype = parse_dtype(document.at("dtype").get<std::string>());
  return text;
}

json to_json(const RunInfo& info) {
  json document = {{"model", info.model},
                   {"model_config", info.model_config},
                   {"objective", info.objective},
                   {"image_size", info.image_size},
                   {"autoencoder",
                    {{"name", info.autoencoder.name},
                     {"path", info.autoencoder.path},
                     {"fingerprint", info.autoencoder.fingerprint},
                     {"scaling_factor", info.autoencoder.scaling_factor},
                     {"shift_factor", info.autoencoder.shift_factor}}},
                   {"class_names", info.class_names},
                   {"ema_decays", info.ema_decays}};
  if (!info.text.encoder.empty()) document["text"] = to_json(info.text);
  if (!info.adapter.config.is_null())
    document["adapter"] = {{"config", info.adapter.config},
                           {"base_path", info.adapter.base_path},
                           {"base_fingerprint", info.adapter.base_fingerprint}};
  return document;
}

RunInfo from_json(const json& document) {
  RunInfo info;
  document.at("model").get_to(info.model);
  info.model_config = document.at("model_config");
  info.objective = document.at("objective");
  document.at("image_size").get_to(info.image_size);
  const json& autoencoder = document.at("autoencoder");
  autoencoder.at("name").get_to(info.autoencoder.name);
  autoencoder.at("path").get_to(info.autoencoder.path);
  autoencoder.at("fingerprint").get_to(info.autoencoder.fingerprint);
  autoencoder.at("scaling_factor").get_to(info.autoencoder.scaling_factor);
  autoencoder.at("shift_factor").get_to(info.autoencoder.shift_factor);
  if (document.contains("text")) info.text = text_from_json(document.at("text"));
  if (document.contains("adapter")) {
    const json& adapter = document.at("adapter");
    info.adapter.config = adapter.at("config");
    adapter.at("base_path").get_to(info.adapter.base_path);
    adapter.at("base_fingerprint").get_to(info.adapter.base_fingerprint);
  }
  document.at("class_names").get_to(info.class_names);
  document.at("ema_decays").get_to(info.ema_decays);
  return info;
}

std::string weights_file_of(const std::string& run, const RunInfo& info, bool use_ema,
                            std::optional<double> decay) {
  if (!use_ema || (info.ema_decays.empty() && !decay)) return kModelFile;
  for (size_t i = 0; i < info.ema_decays.size(); ++i)
    if (!decay || *decay == info.ema_decays[i]) return ema_file_name(info.ema_decays, i);
  fail("run", "{} has no EMA of decay {}: its decays are {}", run, *decay, fmt::join(info.ema_decays, ", "));
}

}  // namespace

bool is_run_folder(const std::string& path) {
  std::error_code unreachable;
  return std::filesystem::is_directory(std::filesystem::path(path) / "checkpoints", unreachable) &&
         std::filesystem::exists(info_path(path), unreachable);
}

void write_run_info(const std::string& run, const RunInfo& info) {
  // Class names may be folder names: bytes that are not UTF-8 become the replacement character, as in stores.
  write_file_atomically("run", info_path(run),
                        to_json(info).dump(2, ' ', false, json::error_handler_t::replace) + "\n");
}

RunInfo read_run_info(const std::string& run) {
  const std::string path = info_path(run);
  std::ifstream file(path);
  if (!file) fail("run", "cannot read {}: {} is not the folder of a training run", path, run);
  try {
    return from_json(json::parse(file));
  } catch (const json::exception& error) {
    fail("run", "{} is not a run's config: {}", path, error.what());
  }
}

std::map<std::string, at::Tensor> load_run_weights(const RunInfo& info, const std::string& file) {
  const RunInfo::AdapterInfo& adapter = info.adapter;
  if (adapter.config.is_null()) return load_tensors(file);
  if (!std::filesystem::exists(adapter.base_path))
    fail("run", "{} changes the weights of {}, which is not there: put it back", file, adapter.base_path);
  if (digest_of_weights(adapter.base_path) != adapter.base_fingerprint)
    fail("run", "{} holds other weights now than those that {} was trained to change", adapter.base_path,
         file);
  std::map<std::string, at::Tensor> weights = load_tensors(adapter.base_path);
  merge_lora(weights, lora_layers(load_tensors(file), adapter.config, file));
  return weights;
}

std::string run_weights(const std::string& run, const RunInfo& info, bool use_ema,
                        std::optional<double> decay) {
  const std::string path = newest_checked_file(run, [&](const std::string& folder) {
    return (std::filesystem::path(folder) / weights_file_of(run, info, use_ema, decay)).string();
  });
  if (path.empty()) fail("run", "{} has no complete checkpoint yet", run);
  return path;
}

}  // namespace kiln
