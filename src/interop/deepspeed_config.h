// --deepspeed ds_config.json: the file that DeepSpeed's users have, as options of training
// (docs/deepspeed.md).
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "run/train_options.h"

namespace kiln {

struct DeepSpeedConfig {
  struct Setting {
    std::string key;     // of the file: "zero_optimization.stage"
    std::string option;  // "zero-stage"
    nlohmann::json value;
    std::string file;                 // that has the key
    bool is_accelerate = false;       // The file is accelerate's, in YAML.
    std::vector<std::string> also{};  // other keys of the file that say the same
  };
  std::vector<Setting> settings;
  std::vector<std::string> warnings;  // one for each key without effect here, with the reason
};

// The options that the file is read together with.
struct DeepSpeedContext {
  TrainOptions ours;  // "auto" takes them
  std::function<bool(const std::string&)> is_given =
      {};  // options on the command line: they may not contradict
  int64_t world_size = 1;
};

// Throws Error: not JSON, an unknown key (naming the nearest known one), a value that Kiln cannot have, keys
// that contradict each other or the command line (naming both).
DeepSpeedConfig parse_deepspeed_config(const std::string& text, const std::string& name,
                                       const DeepSpeedContext& context);
DeepSpeedConfig read_deepspeed_config(const std::string& path, const DeepSpeedContext& context);

// How a user of the files gives an option a value: by the key that sets it, in its file, which the command
// line may not contradict, or else by the option. The passes of a step keep their number of images. "gpus" is
// the option of kiln plan: a file that says how many passes a step has cannot be of another number of ranks.
std::string setting_text(const DeepSpeedConfig& config, const std::string& option, const std::string& value);

// The options with the settings applied.
TrainOptions apply(const DeepSpeedConfig& config, TrainOptions options);

}  // namespace kiln
