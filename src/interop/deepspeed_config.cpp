#include "interop/deepspeed_config.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>

#include "core/error.h"
#include "core/files/text_file.h"
#include "core/tensors.h"
#include "core/text/json_text.h"
#include "core/text/nearest_name.h"
#include "interop/deepspeed_keys.h"
#include "run/option_values.h"

namespace kiln {

namespace {

using nlohmann::json;
using Effect = DeepSpeedKey::Effect;

struct Alias {
  const char *path, *known;
};
constexpr Alias kAliases[] = {
    {"bfloat16", "bf16"},
    {"zero_optimization.stage3_max_reuse_parameters", "zero_optimization.stage3_max_reuse_distance"},
    {"zero_optimization.stage3_gather_fp16_weights_on_model_save",
     "zero_optimization.stage3_gather_16bit_weights_on_model_save"},
};

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

// Undoes what copying from a web page does to a file. Typographic quotes become plain ones. Outside of
// strings, no-break and other wide spaces become spaces, and invisible marks are removed.
std::string without_typography(const std::string& text) {
  struct Replacement {
    std::string_view from, to;
  };
  static constexpr Replacement kReplacements[] = {{"\xC2\xA0", " "},        // no-break space
                                                  {"\xE2\x80\xAF", " "},    // narrow no-break space
                                                  {"\xE2\x80\x83", " "},    // em space
                                                  {"\xE2\x80\x82", " "},    // en space
                                                  {"\xE2\x80\x89", " "},    // thin space
                                                  {"\xE3\x80\x80", " "},    // ideographic space
                                                  {"\xEF\xBB\xBF", ""},     // byte order mark
                                                  {"\xE2\x80\x8B", ""},     // zero-width space
                                                  {"\xE2\x80\x9C", "\""},   // left double quote
                                                  {"\xE2\x80\x9D", "\""}};  // right double quote
  std::string plain;
  bool in_string = false;
  for (size_t i = 0; i < text.size();) {
    const std::string_view rest = std::string_view(text).substr(i);
    const auto* found = std::ranges::find_if(
        kReplacements, [&](const Replacement& one) { return rest.starts_with(one.from); });
    std::string_view next = rest.substr(0, 1);
    size_t length = 1;
    if (in_string && next == "\\" && rest.size() > 1) {
      next = rest.substr(0, length = 2);
    } else if (found != std::end(kReplacements) && (!in_string || found->to == "\"")) {
      next = found->to;
      length = found->from.size();
    }
    if (next == "\"") in_string = !in_string;
    plain += next;
    i += length;
  }
  return plain;
}

class Reader {
 public:
  Reader(const std::string& name, const DeepSpeedContext& context) : name_(name), context_(context) {}

  DeepSpeedConfig read(const json& file) {
    check_type(file, "optimizer", {{"adam", "adamw"}, {"adamw", "adamw"}});
    check_type(file, "scheduler",
               {{"warmuplr", "constant"}, {"warmupdecaylr", "linear"}, {"warmupcosinelr", "cosine"}});
    collect(file, "");
    forget_disabled("fp16");
    forget_disabled("bf16");
    for (const DeepSpeedKey& key : deepspeed_keys()) apply_key(key);
    set_recomputation(file);
    set_types();
    set_batches();
    check_offload();
    return std::move(config_);
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail("deepspeed", "{}: {}", name_, fmt::format(format, std::forward<Args>(args)...));
  }
  void warn(const std::string& text) { config_.warnings.push_back(fmt::format("{}: {}", name_, text)); }

  // Refuses an optimizer or scheduler that Kiln lacks. Comes before the keys are read, because the table does
  // not have those of others.
  void check_type(const json& file, const std::string& section,
                  const std::map<std::string, std::string>& known) {
    const json type = file.value(json::json_pointer("/" + section + "/type"), json("auto"));
    if (type == "auto") return;
    const auto found = type.is_string() ? known.find(lower(type.get<std::string>())) : known.end();
    if (found == known.end())
      refuse("{}.type {} is not in Kiln, which has {}", section, brief(type),
             section == "optimizer" ? "Adam and AdamW" : "WarmupLR, WarmupDecayLR and WarmupCosineLR");
    types_[section] = found->second;
  }

  // Collects every leaf of the file that is not "auto" in values_, under its name in the table.
  void collect(const json& object, const std::string& prefix) {
    for (const auto& [key, value] : object.items()) {
      std::string path = prefix + key;
      for (const Alias& alias : kAliases) {
        if (path != alias.path) continue;
        path = alias.known;
        warn(fmt::format("{} is read as {}", alias.path, path));
      }
      if (is_key(path)) {
        if (!value.is_null() && value != "auto" && !values_.emplace(path, value).second)
          refuse("{} is given twice, under two names: leave one out", path);
      } else if (!is_section(path)) {
        refuse("unknown key '{}': did you mean '{}'?", path, nearest(key, prefix));
      } else if (value.is_object()) {
        collect(value, path + ".");
      } else if (!value.is_null()) {
        refuse("{} expects an object, got {}", path, brief(value));
      }
    }
  }
  static bool is_key(const std::string& path) {
    return std::ranges::any_of(deepspeed_keys(), [&](const DeepSpeedKey& key) { return path == key.path; });
  }
  static bool is_section(const std::string& path) {
    return std::ranges::any_of(deepspeed_keys(), [&](const DeepSpeedKey& key) {
      return std::string_view(key.path).starts_with(path + ".");
    });
  }
  // Returns a key of that name in another section, else the most similar one of this section.
  static std::string nearest(const std::string& key, const std::string& prefix) {
    std::vector<std::string> siblings;
    for (const DeepSpeedKey& known : deepspeed_keys()) {
      std::string path = known.path;
      if (path.ends_with("." + key)) return path;
      if (path.starts_with(prefix))
        siblings.push_back(
            path.substr(prefix.size()).substr(0, path.find('.', prefix.size()) - prefix.size()));
    }
    return prefix + nearest_name(key, siblings);
  }

  // Drops the values of a section that is not enabled. DeepSpeed ignores them too.
  void forget_disabled(const std::string& section) {
    const auto enabled = values_.find(section + ".enabled");
    if (enabled != values_.end() && !enabled->second.is_boolean())
      refuse("{}.enabled expects true or false, got {}", section, brief(enabled->second));
    const bool by_ours = enabled == values_.end() && choice_name(context_.ours.compute.dtype) == section;
    if (by_ours || (enabled != values_.end() && enabled->second == true)) return;
    std::erase_if(values_, [&](const auto& entry) { return entry.first.starts_with(section + "."); });
  }

  void apply_key(const DeepSpeedKey& key) {
    const auto found = values_.find(key.path);
    if (found == values_.end()) return;
    const json& value = found->second;
    switch (key.effect) {
      case Effect::kOption:
        set_converted(key, value);
        break;
      case Effect::kAlways:
        if (value != key.only)
          warn(fmt::format("{} {} has no effect here: {}", key.path, brief(value), key.note));
        break;
      case Effect::kOnly:
        if (value != key.only)
          refuse("{} {} is not supported: {}; leave it out", key.path, brief(value), key.note);
        break;
      case Effect::kNoEffect:
        if (value == false) break;
        warn(fmt::format("{} has no effect here: {}", key.path, key.note));
        break;
      case Effect::kSection:
        if (value.is_object() && value.value("enabled", true) == false) break;
        if (key.only == false) refuse("{} is not supported: {}; leave it out", key.path, key.note);
        warn(fmt::format("{} has no effect here: {}", key.path, key.note));
        break;
      case Effect::kFree:
      case Effect::kTogether:
        break;
    }
  }

  void set_converted(const DeepSpeedKey& key, const json& value) {
    const json converted = key.convert ? key.convert(value) : value;
    if (!converted.is_null())
      set(key.path, key.option, converted);
    else if (value != false)
      warn(fmt::format("{} {} leaves --{} as it is ({})", key.path, brief(value), key.option, key.note));
  }

  // Sets an option. Refuses if another key or the command line gives it another value.
  void set(const std::string& key, const std::string& option, const json& value) {
    TrainOptions with = context_.ours;
    try {
      set_option(with, option, value);
    } catch (const Error& error) {
      throw Error(fmt::format("{} ({}, {})", error.what(), name_, key));
    }
    const json taken = to_json(with).at(option), ours = to_json(context_.ours).at(option);
    if (is_given(option) && taken != ours)
      refuse("{} makes --{} {}, the command line says {}: leave one out", key, option, brief(taken),
             brief(ours));
    for (DeepSpeedConfig::Setting& setting : config_.settings) {
      if (setting.option != option) continue;
      if (setting.value != taken)
        refuse("{} makes --{} {}, {} makes it {}: leave one out", setting.key, option, brief(setting.value),
               key, brief(taken));
      setting.also.push_back(key);
      return;
    }
    config_.settings.push_back({.key = key, .option = option, .value = taken, .file = name_});
  }
  bool is_given(const std::string& option) const { return context_.is_given && context_.is_given(option); }

  // In DeepSpeed the model's code marks what is recomputed, and this section says how. Kiln recomputes every
  // segment if the section is there.
  void set_recomputation(const json& file) {
    const std::string section = "activation_checkpointing";
    const auto found = file.find(section);
    if (found == file.end() || !found->is_object() || found->empty()) return;
    if (found->value("cpu_checkpointing", json(false)) == true || is_given("recompute")) return;
    set(section, "recompute", "all");
  }

  void set_types() {
    if (types_.contains("optimizer")) set("optimizer.type", "optimizer", types_["optimizer"]);
    if (types_.contains("scheduler")) set("scheduler.type", "lr-schedule", types_["scheduler"]);
    if (values_.contains("scheduler.params.warmup_num_steps") &&
        !values_.contains("scheduler.params.warmup_type"))
      set("scheduler.params.warmup_type (absent)", "lr-warmup", "log");
    if (const auto found = values_.find("optimizer.params.betas"); found != values_.end()) {
      if (!found->second.is_array() || found->second.size() != 2)
        refuse("{} expects two numbers, got {}", found->first, brief(found->second));
      set(found->first, "beta1", found->second[0]);
      set(found->first, "beta2", found->second[1]);
    }
    for (const std::string section :
         {"zero_optimization.offload_optimizer", "zero_optimization.offload_param"})
      if (const auto device = values_.find(section + ".device");
          device != values_.end() && device->second == "nvme" && values_.contains(section + ".nvme_path"))
        set(section + ".nvme_path", "nvme-path", values_[section + ".nvme_path"]);
  }

  // A size of the batch from the file, or from the command line where the file has none.
  struct Size {
    std::string where;
    int64_t value = 0;
  };
  std::optional<Size> size_of(const std::string& key, const char* option, int64_t ours) const {
    if (const auto found = values_.find(key); found != values_.end()) {
      if (!is_integer(found->second) || found->second.get<int64_t>() < 1)
        refuse("{} expects a positive number or \"auto\", got {}", key, brief(found->second));
      return Size{key, found->second.get<int64_t>()};
    }
    if (option && is_given(option) && ours > 0) return Size{fmt::format("--{}", option), ours};
    return std::nullopt;
  }

  // Multiplies sizes of a file, which may be any numbers.
  int64_t times(int64_t a, int64_t b) const {
    int64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product))
      refuse("batches of {} x {} pictures cannot be counted: give smaller ones", a, b);
    return product;
  }

  void set_batches() {
    const auto global = size_of("train_batch_size", "global-batch", context_.ours.global_batch);
    const auto micro = size_of("train_micro_batch_size_per_gpu", "micro-batch", context_.ours.micro_batch);
    const auto accumulation = size_of("gradient_accumulation_steps", nullptr, 0);
    const int64_t ranks = context_.world_size;
    if (micro && accumulation) {
      const int64_t product = times(times(micro->value, accumulation->value), ranks);
      if (global && global->value != product)
        refuse("{} {} is not {} {} x {} {} x {} ranks = {}: leave one out", global->where, global->value,
               micro->where, micro->value, accumulation->where, accumulation->value, ranks, product);
      set(micro->where + " x " + accumulation->where, "global-batch", product);
    } else if (micro && !global && context_.ours.global_batch % times(micro->value, ranks) != 0) {
      refuse("{} {} x {} ranks does not divide --global-batch {}: give train_batch_size", micro->where,
             micro->value, ranks, context_.ours.global_batch);
    } else if (global && values_.contains("train_batch_size")) {
      set(global->where, "global-batch", global->value);
    }
    if (micro) {
      if (global && global->value % times(micro->value, ranks) != 0)
        refuse("{} {} is no multiple of {} {} x {} ranks", global->where, global->value, micro->where,
               micro->value, ranks);
      set(micro->where, "micro-batch", micro->value);
    } else if (accumulation) {
      const int64_t batch = global ? global->value : context_.ours.global_batch,
                    passes = times(accumulation->value, ranks);
      if (batch % passes != 0)
        refuse("{} {} is no multiple of {} {} x {} ranks", global ? global->where : "--global-batch", batch,
               accumulation->where, accumulation->value, ranks);
      set(accumulation->where, "micro-batch", batch / passes);
    }
  }

  // Names the file's keys. The later check of the options only knows the names of options.
  void check_offload() {
    const auto is_of_weights = [](const auto& setting) {
      return setting.option == "offload-params" && setting.value != "none";
    };
    const auto found = std::ranges::find_if(config_.settings, is_of_weights);
    if (found == config_.settings.end()) return;
    const int64_t stage = apply(config_, context_.ours).zero.stage;
    if (stage != 3)
      refuse("{} {} needs \"zero_optimization.stage\": 3, got {}: weights are whole on every rank below it",
             found->key, brief(found->value), stage);
  }

  const std::string name_;
  const DeepSpeedContext& context_;
  std::map<std::string, json> values_;
  std::map<std::string, std::string> types_;  // by section: Kiln's name of its "type"
  DeepSpeedConfig config_;
};

}  // namespace

DeepSpeedConfig parse_deepspeed_config(const std::string& text, const std::string& name,
                                       const DeepSpeedContext& context) {
  const json file = parse_json("deepspeed", without_typography(text), name, {.ignores_comments = true});
  if (!file.is_object()) fail("deepspeed", "{} expects a JSON object, got {}", name, file.type_name());
  return Reader(name, context).read(file);
}

DeepSpeedConfig read_deepspeed_config(const std::string& path, const DeepSpeedContext& context) {
  if (!std::filesystem::exists(path)) fail("deepspeed", "cannot read --deepspeed {}", path);
  return parse_deepspeed_config(read_text_file("deepspeed", path), path, context);
}

TrainOptions apply(const DeepSpeedConfig& config, TrainOptions options) {
  for (const DeepSpeedConfig::Setting& setting : config.settings)
    set_option(options, setting.option, setting.value);
  return options;
}

}  // namespace kiln
