#include "models/model_record.h"

#include <cctype>
#include <filesystem>

#include "core/error.h"
#include "core/text/utf8.h"
#include "models/model.h"

namespace kiln {
namespace {

using nlohmann::json;

// What files of earlier versions held: the model's config alone.
constexpr const char* kModelConfigKey = "kiln_model_config";

// Sets `value` if the object has the key. Throws Error naming the key.
class Reader {
 public:
  Reader(const json& document, const std::string& source) : document_(document), source_(source) {
    if (!document.is_object())
      fail("record", "expected a JSON object, got {} ({})", document.type_name(), source);
  }
  template <class T>
  void operator()(const char* key, T& value) const {
    const auto found = document_.find(key);
    if (found == document_.end()) return;
    try {
      found->get_to(value);
    } catch (const json::exception& error) {
      fail("record", "{} holds another kind of value than expected, {} ({})", key, found->type_name(),
           source_);
    }
  }
  // Calls `read` with a reader of the object under the key, if there is one.
  template <class Read>
  void inside(const char* key, const Read& read) const {
    if (const auto found = document_.find(key); found != document_.end() && !found->is_null())
      read(Reader(*found, fmt::format("{} of {}", key, source_)));
  }

 private:
  const json& document_;
  const std::string source_;
};

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
  json document = {{"model", record.model},
                   {"model_config", record.model_config},
                   {"objective", record.objective},
                   {"image_size", record.image_size},
                   {"autoencoder",
                    {{"name", record.autoencoder.name},
                     {"path", record.autoencoder.path},
                     {"fingerprint", record.autoencoder.fingerprint}}},
                   {"class_names", record.class_names},
                   {"ema_decays", record.ema_decays}};
  if (!record.autoencoder.name.empty()) {
    document["autoencoder"]["scaling_factor"] = record.autoencoder.scaling_factor;
    document["autoencoder"]["shift_factor"] = record.autoencoder.shift_factor;
  }
  if (record.autoencoder.downsample > 0)
    document["autoencoder"]["downsample"] = record.autoencoder.downsample;
  const ModelRecord::DrawingInfo& drawing = record.drawing;
  if (!drawing.sampler.empty())
    document["drawing"] = {{"sampler", drawing.sampler},
                           {"num_sampling_steps", drawing.num_sampling_steps},
                           {"cfg_scale", drawing.cfg_scale},
                           {"guided_channels", drawing.guided_channels}};
  if (!drawing.unconditional.empty()) document["drawing"]["unconditional"] = drawing.unconditional;
  if (!record.null_rows.empty()) document["null_rows"] = record.null_rows;
  for (const ModelRecord::PictureSize& size : record.buckets)
    document["buckets"].push_back({size.height, size.width});
  const ModelRecord::TextInfo& text = record.text;
  if (!text.encoder.empty())
    document["text"] = {{"encoder", text.encoder},
                        {"path", text.encoder_path},
                        {"fingerprint", text.encoder_fingerprint},
                        {"tokenizer_fingerprint", text.tokenizer_fingerprint},
                        {"max_tokens", text.max_tokens},
                        {"prefix", text.prefix},
                        {"suffix", text.suffix},
                        {"instruction", text.instruction},
                        {"dtype", dtype_name(text.dtype)}};
  const ModelRecord::AdapterInfo& adapter = record.adapter;
  if (!adapter.config.is_null() || !adapter.base_fingerprint.empty())
    document["adapter"] = {{"config", adapter.config},
                           {"base_path", adapter.base_path},
                           {"base_fingerprint", adapter.base_fingerprint},
                           {"base_values", adapter.base_values}};
  if (!record.average.empty()) document["average"] = record.average;
  if (!record.trained_on.empty()) document["trained_on"] = record.trained_on;
  return document;
}

ModelRecord parse_model_record(const json& document, const std::string& source) {
  ModelRecord record;
  const Reader read(document, source);
  read("model", record.model);
  read("model_config", record.model_config);
  read("objective", record.objective);
  read("image_size", record.image_size);
  record.autoencoder.name.clear();
  read.inside("autoencoder", [&](const Reader& part) {
    part("name", record.autoencoder.name);
    part("path", record.autoencoder.path);
    part("fingerprint", record.autoencoder.fingerprint);
    part("scaling_factor", record.autoencoder.scaling_factor);
    part("shift_factor", record.autoencoder.shift_factor);
    part("downsample", record.autoencoder.downsample);
  });
  read.inside("drawing", [&](const Reader& part) {
    part("sampler", record.drawing.sampler);
    part("num_sampling_steps", record.drawing.num_sampling_steps);
    part("cfg_scale", record.drawing.cfg_scale);
    part("guided_channels", record.drawing.guided_channels);
    part("unconditional", record.drawing.unconditional);
  });
  read("null_rows", record.null_rows);
  std::vector<std::array<int64_t, 2>> buckets;
  read("buckets", buckets);
  for (const auto& [height, width] : buckets) record.buckets.push_back({.height = height, .width = width});
  read.inside("text", [&](const Reader& part) {
    part("encoder", record.text.encoder);
    part("path", record.text.encoder_path);
    part("fingerprint", record.text.encoder_fingerprint);
    part("tokenizer_fingerprint", record.text.tokenizer_fingerprint);
    part("max_tokens", record.text.max_tokens);
    part("prefix", record.text.prefix);
    part("suffix", record.text.suffix);
    part("instruction", record.text.instruction);
    std::string dtype(dtype_name(record.text.dtype));
    part("dtype", dtype);
    record.text.dtype = parse_dtype(dtype);
  });
  read.inside("adapter", [&](const Reader& part) {
    part("config", record.adapter.config);
    part("base_path", record.adapter.base_path);
    part("base_fingerprint", record.adapter.base_fingerprint);
    part("base_values", record.adapter.base_values);
  });
  read("class_names", record.class_names);
  read("ema_decays", record.ema_decays);
  read("average", record.average);
  read("trained_on", record.trained_on);
  if (!record.model_config.is_object())
    fail("record", "model_config is not a JSON object: {} ({})", record.model_config.type_name(), source);
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
    json document = json::parse(found->second, nullptr, /*allow_exceptions=*/false);
    const std::string place = fmt::format("metadata \"{}\" of {}", key, source);
    if (!document.is_object()) fail("record", "{} is not a JSON object", place);
    return parse_model_record(key == kRecordKey ? document : json{{"model_config", document}}, place);
  }
  return std::nullopt;
}

}  // namespace kiln
