// Which keys of a DeepSpeed or accelerate file to change so that an option gets a value.
#include <algorithm>

#include "core/error.h"
#include "core/text/json_text.h"
#include "interop/deepspeed_config.h"

namespace kiln {

using nlohmann::json;

namespace {

constexpr const char* kPasses = "gradient_accumulation_steps";

const DeepSpeedConfig::Setting* setting_of(const DeepSpeedConfig& config, const std::string& option) {
  const auto found = std::ranges::find(config.settings, option, &DeepSpeedConfig::Setting::option);
  return found == config.settings.end() ? nullptr : &*found;
}

// Returns "with \"train_batch_size\": 256 and without gradient_accumulation_steps", or the latter alone. That
// keeps the batch for any number of passes.
std::string kept_batch(const DeepSpeedConfig& config) {
  const auto* batch = setting_of(config, "global-batch");
  return (batch ? fmt::format("with \"train_batch_size\": {} and ", batch->value.dump()) : "") + "without " +
         kPasses;
}

// Returns the option, with the change that a DeepSpeed file needs beside it if it fixes the number of passes.
std::string passes_text(const DeepSpeedConfig& config, const std::string& option, const std::string& value) {
  const auto says_passes = [](const auto& setting) { return setting.key.find(kPasses) != std::string::npos; };
  const auto found = std::ranges::find_if(config.settings, says_passes);
  const bool stays = found == config.settings.end() || found->is_accelerate;
  return fmt::format("--{} {}", option, value) +
         (stays ? "" : fmt::format(", {} in {}", kept_batch(config), found->file));
}

}  // namespace

std::string setting_text(const DeepSpeedConfig& config, const std::string& option, const std::string& value) {
  if (option == "gpus") return passes_text(config, option, value);
  const auto* const found = setting_of(config, option);
  if (!found) return fmt::format("--{} {}", option, value);
  if (option == "recompute")  // The file can only say all, and the option goes before it.
    return fmt::format("--{} {}", option, value);
  const bool is_batch = option == "micro-batch" || option == "global-batch";
  if (found->is_accelerate && is_batch)  // Accelerate's file has only the number of passes.
    return fmt::format("--{} {}, without gradient_accumulation_steps in {}", option, value, found->file);
  if (found->is_accelerate) return fmt::format("{}: {} in {}", found->key, value, found->file);
  if (option == "micro-batch" && value.starts_with('-'))  // Kiln chooses, which DeepSpeed's file cannot say.
    return fmt::format("--micro-batch {}, without train_micro_batch_size_per_gpu and {} in {}", value,
                       kept_batch(config), found->file);
  if (option == "micro-batch")  // The file may give the number of passes instead.
    return fmt::format("\"train_micro_batch_size_per_gpu\": {} in {}, {}", value, found->file,
                       kept_batch(config));
  if (option == "compute-dtype")
    return fmt::format("\"{}\": {{\"enabled\": true}} in {}", value, found->file);
  json parsed = json_or_discarded("deepspeed", value, option);
  if (parsed.is_discarded()) parsed = value;
  std::vector<std::string> keys = {option == "global-batch" ? "train_batch_size" : found->key};
  if (option != "global-batch") keys.insert(keys.end(), found->also.begin(), found->also.end());
  std::string text;
  for (const std::string& key : keys) {
    // These keys are true or false.
    const bool is_flag =
        key.find("cpu_offload") != std::string::npos || key.find("cpu_checkpointing") != std::string::npos;
    text += fmt::format("{}\"{}\": {}", text.empty() ? "" : " and ", key,
                        is_flag              ? json(parsed != "none").dump()
                        : parsed.is_string() ? parsed.dump()
                                             : value);
  }
  const bool counts_passes = option == "global-batch" && found->key.find(kPasses) != std::string::npos;
  return fmt::format("{} in {}{}", text, found->file,
                     counts_passes ? fmt::format(", without {}", kPasses) : "");
}

}  // namespace kiln
