#include "evaluate/protocol.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <span>

#include "core/error.h"
#include "core/files/xxh3.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string stamp_of(const json& protocol) {
  const std::string text = protocol.dump();  // keys are sorted
  return xxh3_hex(std::as_bytes(std::span(text)));
}

std::string value_text(const json& value) {
  return value.is_null() ? "not known" : value.is_string() ? value.get<std::string>() : value.dump();
}

}  // namespace

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
  std::ifstream file(!fs::is_directory(path) && fs::exists(own) ? own : folder / "sampling.json");
  const json settings = file ? json::parse(file, nullptr, /*allow_exceptions=*/false) : json();
  if (!settings.is_object()) return {};
  SampleOrigin origin;
  for (const char* key :
       {"sampler", "cfg_scale", "cfg_convention", "classes", "compute_dtype", "autoencoder"})
    origin.protocol[key] = settings.value(key, json());
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
  std::set<std::string> paths;
  const json flat_a = a.flatten(), flat_b = b.flatten();
  for (const json* flat : {&flat_a, &flat_b})
    for (const auto& [path, value] : flat->items()) paths.insert(path);
  std::vector<std::string> differences;
  for (const std::string& path : paths) {
    const json in_a = flat_a.value(path, json()), in_b = flat_b.value(path, json());
    if (in_a == in_b) continue;
    std::string name = path.empty() ? "all of it" : path.substr(1);
    std::replace(name.begin(), name.end(), '/', '.');
    differences.push_back(fmt::format("{}: {} | {}", name, value_text(in_a), value_text(in_b)));
  }
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
