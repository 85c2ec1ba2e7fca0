// --deepspeed ds_config.json: the file that DeepSpeed's users have, as options of training
// (docs/deepspeed.md).
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/json.h"
#include "run/train_options.h"

namespace kiln {

struct DeepSpeedConfig {
  struct Setting {
    std::string key;     // in the file: "zero_optimization.stage"
    std::string option;  // "zero-stage"
    nlohmann::json value;
    std::string file;                 // the file that has the key
    bool is_accelerate = false;       // the file is accelerate's YAML
    std::vector<std::string> also{};  // other keys of the file that set the same value
  };
  std::vector<Setting> settings;
  std::vector<std::string> warnings;  // one for each key that has no effect here, with the reason
};

// The options and ranks that the file is read together with.
struct DeepSpeedContext {
  TrainOptions ours;  // an "auto" of the file takes its value from here
  // True for an option on the command line, which the file may not contradict.
  std::function<bool(const std::string&)> is_given = {};
  int64_t world_size = 1;
};

// Translates the file into options of training. Throws Error if the text is not JSON, has an unknown key
// (naming the nearest known one) or a value that Kiln cannot take, or if keys contradict each other or the
// command line (naming both).
DeepSpeedConfig parse_deepspeed_config(const std::string& text, const std::string& name,
                                       const DeepSpeedContext& context);
DeepSpeedConfig read_deepspeed_config(const std::string& path, const DeepSpeedContext& context);

// Returns how a user gives an option a value: by the key that sets it in its file, because the command line
// may not contradict the file, or else by the option itself. A new micro-batch keeps the global batch. "gpus"
// is an option of kiln plan. A file that fixes the number of passes of a step also fixes the number of ranks,
// so the text for "gpus" then says what to change in the file.
std::string setting_text(const DeepSpeedConfig& config, const std::string& option, const std::string& value);

// Returns the options with the settings applied.
TrainOptions apply(const DeepSpeedConfig& config, TrainOptions options);

// --accelerate default_config.yaml: what `accelerate config` writes, as options of training.
//
// Translates the file into options of training. Its DeepSpeed section, or the DeepSpeed file that it names,
// is read by the rules of parse_deepspeed_config(). Throws Error if the text is not such YAML, has an unknown
// key, asks for what Kiln cannot do, or contradicts the command line.
DeepSpeedConfig parse_accelerate_config(const std::string& text, const std::string& name,
                                        const DeepSpeedContext& context);
DeepSpeedConfig read_accelerate_config(const std::string& path, const DeepSpeedContext& context);

}  // namespace kiln
