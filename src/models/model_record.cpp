#include "models/model_record.h"

#include <cctype>
#include <filesystem>

#include "core/error.h"
#include "core/json_config.h"
#include "core/json_fields.h"
#include "core/text/json_text.h"
#include "core/text/utf8.h"
#include "models/model.h"

namespace kiln {
namespace {

using nlohmann::json;

// What files of earlier versions held: the model's config alone.
constexpr const char* kModelConfigKey = "kiln_model_config";

// Sets `value` if the object has the key.
void read_value(const JsonConfig& config, const char* key, json& value) {
  if (config.has(key)) value = config.at(key);
}

// Calls `read_keys` with the object's reader. Its errors name `place`.
template <class ReadKeys>
void read_object(const json& object, const std::string& place, const ReadKeys& read_keys) {
  try {
    read_keys(JsonConfig("record", object));
  } catch (const Error& error) {
    fail("record", "{} ({})", message_of(error), place);
  }
}

std::vector<ModelRecord::PictureSize> read_buckets(const JsonConfig& config) {
  std::vector<ModelRecord::PictureSize> buckets;
  if (!config.has("buckets")) return buckets;
  const json& sizes = config.at("buckets");
  buckets.reserve(sizes.size());
  for (const json& size : sizes) {
    if (!size.is_array() || size.size() != 2 || !is_integer(size[0]) || !is_integer(size[1]))
      fail(config.who(), "expected buckets to be a list of [height, width], got {}", brief(sizes));
    buckets.push_back({.height = size[0].get<int64_t>(), .width = size[1].get<int64_t>()});
  }
  return buckets;
}

std::string file_name_of(const std::string& path) {
  const std::filesystem::path given = path;
  return (given.has_filename() ? given : given.parent_path()).filename().string();
}

// Whether a folder of this name may hold anything.
bool is_untelling(const std::string& name) {
  constexpr size_t kLeastHash = 12;  // digits
  const bool is_hash =
      name.size() >= kLeastHash && name.find_first_not_of("0123456789abcdef") == std::string::npos;
  return is_hash || name == "model" || name == "snapshots";
}

// Whether the folder is named after a person.
bool is_home(const std::filesystem::path& folder) {
  const std::filesystem::path parent = folder.parent_path();
  return parent == "/home" || parent == "/Users";
}

// Returns the record as files that travel hold it: without paths of this machine, and of these weights alone.
json portable(const ModelRecord& record) {
  ModelRecord result = record;
  for (std::string* path : {&result.autoencoder.path, &result.text.encoder_path}) *path = piece_name(*path);
  result.adapter.base_path = file_name_of(result.adapter.base_path);
  result.ema_decays.clear();
  return to_json(result);
}

// "dit-xl-2" for DiT-XL/2.
std::string architecture_of(std::string name) {
  for (char& c : name) c = c == '/' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

// modelspec knows epsilon and v; flow matching has no word of its own there.
std::string prediction_of(const json& objective) {
  const std::string type = objective.value("type", "");
  if (type != "ddpm") return type == "iddpm" ? "epsilon" : type;
  const std::string prediction = objective.value("prediction_type", "epsilon");
  return prediction == "v_prediction" ? "v" : prediction;
}

}  // namespace

json to_json(const ModelRecord& record) {
  json document;
  KILN_WRITE_FIELDS(document, record, model, model_config, objective, image_size, class_names, ema_decays);
  json& autoencoder = document["autoencoder"];
  KILN_WRITE_FIELDS(autoencoder, record.autoencoder, name, path, fingerprint);
  if (!record.autoencoder.name.empty())
    KILN_WRITE_FIELDS(autoencoder, record.autoencoder, scaling_factor, shift_factor);
  if (record.autoencoder.downsample > 0) KILN_WRITE_FIELDS(autoencoder, record.autoencoder, downsample);
  const ModelRecord::DrawingInfo& drawing = record.drawing;
  if (!drawing.sampler.empty())
    KILN_WRITE_FIELDS(document["drawing"], drawing, sampler, num_sampling_steps, cfg_scale, guided_channels);
  if (!drawing.unconditional.empty()) document["drawing"]["unconditional"] = drawing.unconditional;
  if (!record.null_rows.empty()) document["null_rows"] = record.null_rows;
  for (const ModelRecord::PictureSize& size : record.buckets)
    document["buckets"].push_back({size.height, size.width});
  const ModelRecord::TextInfo& text = record.text;
  if (!text.encoder.empty()) {
    document["text"] = {{"path", text.encoder_path},
                        {"fingerprint", text.encoder_fingerprint},
                        {"dtype", dtype_name(text.dtype)}};
    KILN_WRITE_FIELDS(document["text"], text, encoder, tokenizer_fingerprint, max_tokens, prefix, suffix,
                      instruction);
  }
  const ModelRecord::AdapterInfo& adapter = record.adapter;
  if (!adapter.config.is_null() || !adapter.base_fingerprint.empty())
    KILN_WRITE_FIELDS(document["adapter"], adapter, config, base_path, base_fingerprint, base_values);
  if (!record.average.empty()) document["average"] = record.average;
  if (!record.trained_on.empty()) document["trained_on"] = record.trained_on;
  return document;
}

ModelRecord parse_model_record(const json& document, const std::string& source) {
  ModelRecord record;
  record.autoencoder.name.clear();
  read_object(document, source, [&](const JsonConfig& whole) {
    KILN_GET_FIELDS(whole, record, model);
    record.model_config = whole.object("model_config");
    read_value(whole, "objective", record.objective);
    KILN_GET_FIELDS(whole, record, image_size, null_rows);
    record.buckets = read_buckets(whole);
    KILN_GET_FIELDS(whole, record, class_names, ema_decays, average);
    read_value(whole, "trained_on", record.trained_on);
  });
  // Reads the object under the key, if there is one.
  const auto inside = [&](const char* key, const auto& read_part) {
    if (const auto part = document.find(key); part != document.end() && !part->is_null())
      read_object(*part, fmt::format("{} of {}", key, source), read_part);
  };
  inside("autoencoder", [&](const JsonConfig& part) {
    KILN_GET_FIELDS(part, record.autoencoder, name, path, fingerprint, scaling_factor, shift_factor,
                    downsample);
  });
  inside("drawing", [&](const JsonConfig& part) {
    KILN_GET_FIELDS(part, record.drawing, sampler, num_sampling_steps, cfg_scale, guided_channels,
                    unconditional);
  });
  inside("text", [&](const JsonConfig& part) {
    KILN_GET_FIELDS(part, record.text, encoder);
    record.text.encoder_path = part.get("path", record.text.encoder_path);
    record.text.encoder_fingerprint = part.get("fingerprint", record.text.encoder_fingerprint);
    KILN_GET_FIELDS(part, record.text, tokenizer_fingerprint, max_tokens, prefix, suffix, instruction);
    record.text.dtype = parse_dtype(part.get("dtype", std::string(dtype_name(record.text.dtype))));
  });
  inside("adapter", [&](const JsonConfig& part) {
    read_value(part, "config", record.adapter.config);
    KILN_GET_FIELDS(part, record.adapter, base_path, base_fingerprint, base_values);
  });
  return record;
}

int64_t drawn_side(const ModelRecord& record, const DenoiserShape& shape, int64_t downsample) {
  const int64_t pixels = record.autoencoder.downsample > 0 ? record.autoencoder.downsample : downsample;
  const int64_t multiple = shape.size_multiple * pixels;
  const bool takes_it = record.image_size > 0 && multiple > 0 && record.image_size % multiple == 0;
  return takes_it ? record.image_size / pixels : shape.input_size;
}

std::string piece_name(const std::string& path) {
  constexpr std::string_view kHubFolder = "models--";
  std::filesystem::path name;
  for (std::filesystem::path rest = path; rest.has_relative_path(); rest = rest.parent_path()) {
    const std::string part = rest.filename().string();
    if (part.empty() || part == "." || part == "..") continue;
    if (is_home(rest)) break;
    if (part.starts_with(kHubFolder)) return part.substr(part.rfind("--") + 2);
    name = name.empty() ? std::filesystem::path(part) : std::filesystem::path(part) / name;
    if (!is_untelling(part)) break;
  }
  return name.string();
}

std::map<std::string, std::string> metadata_of(const ModelRecord& record) {
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  if (record.model.empty()) return metadata;
  metadata[kRecordKey] = dump_utf8(portable(record));
  metadata["modelspec.sai_model_spec"] = "1.0.1";
  metadata["modelspec.architecture"] = architecture_of(record.model);
  metadata["modelspec.implementation"] = "kiln";
  metadata["modelspec.title"] = record.model;
  if (record.image_size > 0) metadata["modelspec.resolution"] = fmt::format("{0}x{0}", record.image_size);
  if (record.objective.is_object()) metadata["modelspec.prediction_type"] = prediction_of(record.objective);
  return metadata;
}

std::optional<ModelRecord> record_of(const std::map<std::string, std::string>& metadata,
                                     const std::string& source) {
  for (const char* key : {kRecordKey, kModelConfigKey}) {
    const auto found = metadata.find(key);
    if (found == metadata.end()) continue;
    const std::string place = fmt::format("metadata \"{}\" of {}", key, source);
    const json document = json_or_discarded("record", found->second, place);
    if (!document.is_object()) fail("record", "{} is not a JSON object", place);
    return parse_model_record(key == kRecordKey ? document : json{{"model_config", document}}, place);
  }
  return std::nullopt;
}

}  // namespace kiln
