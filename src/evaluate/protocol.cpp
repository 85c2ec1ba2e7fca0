#include "evaluate/protocol.h"

#include <fmt/ranges.h>

#include <filesystem>
#include <set>
#include <span>

#include "core/error.h"
#include "core/files/xxh3.h"
#include "core/text/json_text.h"
#include "core/text/utf8.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::literals::operator""_json_pointer;

std::string stamp_of(const json& protocol) {
  const std::string text = dump_utf8(protocol);  // keys are sorted
  return xxh3_hex(std::as_bytes(std::span(text)));
}

void add_fields(const std::string& name, const json& value, std::map<std::string, json>& fields) {
  if (!value.is_object()) {
    fields[name] = value;
    return;
  }
  for (const auto& [key, entry] : value.items())
    add_fields(name.empty() ? key : fmt::format("{}.{}", name, key), entry, fields);
}

// Returns "250 | 50". Of two long lists of a length, which may read alike, the first entries that differ.
std::string difference_text(const json& a, const json& b) {
  if (a.is_array() && b.is_array() && a.size() == b.size())
    for (size_t i = 0; i < a.size(); ++i)
      if (a[i] != b[i]) return fmt::format("entry {}: {} | {}", i + 1, a[i].dump(), b[i].dump());
  return field_text(a) + " | " + field_text(b);
}

}  // namespace

std::map<std::string, json> protocol_fields(const json& protocol) {
  std::map<std::string, json> fields;
  add_fields("", protocol, fields);
  return fields;
}

std::string field_text(const json& value) {
  constexpr size_t kMostShown = 8, kFirstShown = 3;  // of a list
  if (value.is_null()) return "not known";
  if (value == "") return "none";
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return dump_utf8(value);
  std::vector<std::string> shown;
  for (size_t i = 0; i < value.size(); ++i)
    if (value.size() <= kMostShown || i < kFirstShown || i + 1 == value.size())
      shown.push_back(value[i].is_number_float() ? fmt::format("{:.6g}", value[i].get<double>())
                                                 : field_text(value[i]));
    else if (i == kFirstShown)
      shown.push_back("...");
  const std::string count = value.size() > kMostShown ? fmt::format(" ({} values)", value.size()) : "";
  return shown.empty() ? "none" : fmt::format("{}{}", fmt::join(shown, ", "), count);
}

json prompts_protocol(const std::vector<std::string>& prompts) {
  std::string all;
  for (const std::string& prompt : prompts) all += prompt + '\n';
  return {{"count", prompts.size()}, {"texts", "xxh3:" + xxh3_hex(std::as_bytes(std::span(all)))}};
}

json stamped(json metrics, json protocol) {
  const std::string stamp = stamp_of(protocol);
  return {{"metrics", std::move(metrics)}, {"protocol", std::move(protocol)}, {"stamp", stamp}};
}

SampleOrigin origin_of_samples(const std::string& path) {
  const fs::path folder = fs::is_directory(path) ? fs::path(path) : fs::path(path).parent_path();
  const fs::path own = path + ".json";
  const fs::path file = !fs::is_directory(path) && fs::exists(own) ? own : folder / "sampling.json";
  const json settings = fs::exists(file) ? read_json_or_discarded("evaluate", file.string()) : json();
  if (!settings.is_object()) return {};
  SampleOrigin origin;
  for (const char* key : {"sampler", "cfg_scale", "cfg_convention", "compute_dtype", "autoencoder"})
    origin.protocol[key] = settings.value(key, json());
  const bool takes_labels =
      !settings.contains("prompts") && settings.value("/model/num_classes"_json_pointer, int64_t{1}) > 0;
  if (takes_labels) origin.protocol["classes"] = settings.value("classes", json());
  if (takes_labels || settings.contains("label_sampling"))  // prompts may be drawn at random as well
    origin.protocol["label_sampling"] = settings.value("label_sampling", "in turn");
  origin.protocol["guidance_interval"] = settings.value("guidance_interval", "");
  // Earlier versions wrote only whether it was an average, not which.
  origin.protocol["ema"] = settings.value("average", settings.value("ema", json(true)));
  for (const char* key : {"negative_prompt", "text_encoder", "size", "tiles"})
    if (settings.contains(key)) origin.protocol[key] = settings[key];
  if (settings.contains("prompts"))
    origin.protocol["prompts"] = prompts_protocol(settings["prompts"].get<std::vector<std::string>>());
  if (settings.value("tf32", false)) origin.protocol["tf32"] = true;
  origin.protocol["uint8"] = "truncate(clamp(127.5 x + 128, 0, 255))";
  for (const char* key : {"weights", "model", "seed"}) origin.subject[key] = settings.value(key, json());
  return origin;
}

std::vector<std::string> protocol_differences(const json& a, const json& b) {
  std::map<std::string, json> in_a = protocol_fields(a), in_b = protocol_fields(b);
  std::set<std::string> names;
  for (const auto* fields : {&in_a, &in_b})
    for (const auto& [name, value] : *fields) names.insert(name);
  std::vector<std::string> differences;
  for (const std::string& name : names)
    if (in_a[name] != in_b[name])
      differences.push_back(
          fmt::format("{}: {}", name.empty() ? "all of it" : name, difference_text(in_a[name], in_b[name])));
  return differences;
}

std::string comparison_text(const std::vector<std::string>& names, const std::vector<json>& results) {
  std::set<std::string> metrics;
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].is_object() || !results[i].contains("metrics") || !results[i].contains("protocol"))
      fail("evaluate", "{} is not a result of kiln evaluate", names[i]);
    for (const auto& [name, value] : results[i].at("metrics").items()) metrics.insert(name);
  }
  std::string text = fmt::format("{:28}", "");
  for (const std::string& name : names)
    text += fmt::format(" {:>20}", name.size() > 20 ? name.substr(name.size() - 20) : name);
  text += '\n';
  for (const std::string& metric : metrics) {
    text += fmt::format("{:28}", metric);
    for (const json& result : results) {
      const json value = result.at("metrics").value(metric, json());
      text += value.is_number() ? fmt::format(" {:20.6g}", value.get<double>()) : fmt::format(" {:>20}", "-");
    }
    text += '\n';
  }
  for (size_t i = 1; i < results.size(); ++i) {
    const auto differences = protocol_differences(results[0].at("protocol"), results[i].at("protocol"));
    if (differences.empty()) continue;
    text += fmt::format("{} and {} were measured differently and do not compare:\n  {}\n", names[0], names[i],
                        fmt::join(differences, "\n  "));
  }
  return text;
}

}  // namespace kiln
