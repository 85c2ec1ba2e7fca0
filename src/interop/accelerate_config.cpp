#include "interop/deepspeed_config.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/text/json_text.h"
#include "core/text/nearest_name.h"
#include "core/text/yaml.h"
#include "run/option_values.h"

namespace kiln {
namespace {

using nlohmann::json;

// A key of the section deepspeed_config, and its path in DeepSpeed's own file.
struct SectionKey {
  const char *key, *path;
};
constexpr SectionKey kSectionKeys[] = {
    {"zero_stage", "/zero_optimization/stage"},
    {"offload_optimizer_device", "/zero_optimization/offload_optimizer/device"},
    {"offload_optimizer_nvme_path", "/zero_optimization/offload_optimizer/nvme_path"},
    {"offload_param_device", "/zero_optimization/offload_param/device"},
    {"offload_param_nvme_path", "/zero_optimization/offload_param/nvme_path"},
    {"gradient_accumulation_steps", "/gradient_accumulation_steps"},
    {"gradient_clipping", "/gradient_clipping"}};

// The key that names DeepSpeed's own file.
constexpr const char* kOwnFile = "deepspeed_config_file";

// Keys that have no meaning here, or ask for what Kiln does anyway.
constexpr const char* kWithoutEffect[] = {
    "compute_environment", "debug",        "downcast_bf16",          "enable_cpu_affinity",
    "machine_rank",        "fsdp_config",  "main_training_function", "main_process_ip",
    "main_process_port",   "rdzv_backend", "same_network",           "tpu_env",
    "tpu_use_cluster",     "tpu_use_sudo", "mpirun_config",          "dynamo_config",
    "ipex_config",         "fp8_config",   "megatron_lm_config",     "parallelism_config"};
constexpr const char* kSectionWithoutEffect[] = {"zero3_init_flag", "zero3_save_16bit_model",
                                                 "deepspeed_multinode_launcher", "deepspeed_hostfile",
                                                 "deepspeed_moe_layer_cls_names"};
constexpr const char* kRead[] = {"distributed_type", "num_processes", "num_machines",    "mixed_precision",
                                 "use_cpu",          "gpu_ids",       "deepspeed_config"};

template <size_t N>
bool is_among(const std::string& key, const char* const (&names)[N]) {
  return std::ranges::find(names, key) != std::end(names);
}

class AccelerateReader {
 public:
  AccelerateReader(json file, const std::string& name, const DeepSpeedContext& context)
      : file_(std::move(file)), name_(name), context_(context) {}

  DeepSpeedConfig read() {
    check_keys();
    const std::string type = text("distributed_type", "NO");
    if (type != "NO" && type != "MULTI_CPU" && type != "MULTI_GPU" && type != "DEEPSPEED")
      refuse("distributed_type {} is not supported: Kiln divides a model by ZeRO (--zero-stage)", type);
    read_ranks();
    const json section =
        type == "DEEPSPEED" ? file_.value("deepspeed_config", json::object()) : json::object();
    if (!section.is_object()) refuse("deepspeed_config expects keys below it, got {}", brief(section));
    check_section(section);
    const std::string own_file = own_file_of(section);
    DeepSpeedConfig config = own_file.empty() ? read_section(section) : read_own_file(section, own_file);
    config.settings.insert(config.settings.begin(), settings_.begin(), settings_.end());
    config.warnings.insert(config.warnings.begin(), warnings_.begin(), warnings_.end());
    return config;
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail("accelerate", "{}: {}", name_, fmt::format(format, std::forward<Args>(args)...));
  }

  std::string text(const char* key, const std::string& otherwise) const {
    const json value = file_.value(key, json(otherwise));
    if (value == false) return "no";  // YAML takes a bare no for false
    if (!value.is_string()) refuse("{} expects a word, got {}", key, brief(value));
    return value.get<std::string>();
  }

  void check_keys() const {
    for (const auto& [key, value] : file_.items()) {
      if (is_among(key, kRead) || is_among(key, kWithoutEffect)) continue;
      refuse("unknown key '{}': did you mean '{}'?", key,
             nearest_name(key, std::vector<std::string>(std::begin(kRead), std::end(kRead))));
    }
  }

  void set(const std::string& key, const std::string& option, const json& value) {
    TrainOptions with = context_.ours;
    set_option(with, option, value);
    const json taken = to_json(with).at(option), ours = to_json(context_.ours).at(option);
    if (context_.is_given && context_.is_given(option) && taken != ours)
      refuse("{} makes --{} {}, the command line says {}: leave one out", key, option, brief(taken),
             brief(ours));
    settings_.push_back({.key = key, .option = option, .value = taken, .file = name_, .is_accelerate = true});
  }

  void read_ranks() {
    if (file_.value("num_machines", json(1)) != 1)
      refuse(
          "num_machines {}: start the ranks of several machines with a launcher, and leave num_machines and "
          "num_processes out",
          brief(file_["num_machines"]));
    if (file_.contains("num_processes")) {
      const json& count = file_["num_processes"];
      if (!is_integer(count) || count.get<int64_t>() < 1)
        refuse("num_processes expects a positive number, got {}", brief(count));
      if (count != 1) set("num_processes", "nproc", count);
      if (context_.world_size <= 1) context_.world_size = count.get<int64_t>();
    }
    if (file_.value("use_cpu", json(false)) == true) set("use_cpu", "device", "cpu");
    if (precision() == "fp8") set("mixed_precision", "compute-dtype", "fp8");
    if (const json gpus = file_.value("gpu_ids", json("all")); gpus != "all" && !gpus.is_null())
      warnings_.push_back(
          fmt::format("{}: gpu_ids has no effect: CUDA_VISIBLE_DEVICES chooses the GPUs", name_));
  }

  void check_section(const json& section) const {
    std::vector<std::string> names = {kOwnFile};
    for (const SectionKey& one : kSectionKeys) names.push_back(one.key);
    for (const auto& [key, value] : section.items())
      if (std::ranges::find(names, key) == names.end() && !is_among(key, kSectionWithoutEffect))
        refuse("unknown key 'deepspeed_config.{}': did you mean '{}'?", key, nearest_name(key, names));
  }

  static bool is_unset(const json& value) { return value.is_null() || value == "none" || value == "None"; }

  std::string own_file_of(const json& section) const {
    const json path = section.value(kOwnFile, json());
    if (is_unset(path)) return "";
    if (!path.is_string()) refuse("deepspeed_config.{} expects a path, got {}", kOwnFile, brief(path));
    return path.get<std::string>();
  }

  // Returns "no", "fp16", "bf16" or "fp8".
  std::string precision() const {
    std::string precision = text("mixed_precision", "no");
    if (precision != "no" && precision != "fp16" && precision != "bf16" && precision != "fp8")
      refuse("mixed_precision expects no, fp16, bf16 or fp8, got {}", precision);
    return precision;
  }

  // Reads the DeepSpeed file that the section names. Refuses keys beside it that set the same things, as
  // accelerate does.
  DeepSpeedConfig read_own_file(const json& section, const std::string& path) const {
    const auto refuse_beside = [&](const std::string& key) {
      refuse("{} has no effect beside {} {}: say it there and leave it out here", key, kOwnFile, path);
    };
    for (const SectionKey& one : kSectionKeys)
      if (!is_unset(section.value(one.key, json())))
        refuse_beside(std::string("deepspeed_config.") + one.key);
    if (precision() != "no") refuse_beside("mixed_precision " + precision());
    return read_deepspeed_config(path, context_);
  }

  // Reads the section and the precision as DeepSpeed's own file would be read.
  DeepSpeedConfig read_section(const json& section) const {
    json file = json::object();
    for (const SectionKey& one : kSectionKeys)
      if (const json value = section.value(one.key, json()); !is_unset(value))
        file[json::json_pointer(one.path)] = value;
    if (precision() == "fp16" || precision() == "bf16") file[precision()] = {{"enabled", true}};
    DeepSpeedConfig config = parse_deepspeed_config(file.dump(), name_, context_);
    for (DeepSpeedConfig::Setting& setting : config.settings) {
      setting.key = own_key(setting.key);
      setting.is_accelerate = true;
    }
    return config;
  }

  // "zero_optimization.stage" -> "deepspeed_config.zero_stage"
  static std::string own_key(const std::string& key) {
    std::string path = "/" + key;
    std::ranges::replace(path, '.', '/');
    for (const SectionKey& one : kSectionKeys)
      if (path == one.path) return std::string("deepspeed_config.") + one.key;
    return key == "fp16.enabled" || key == "bf16.enabled" ? "mixed_precision" : key;
  }

  const json file_;
  const std::string name_;
  DeepSpeedContext context_;
  std::vector<DeepSpeedConfig::Setting> settings_;
  std::vector<std::string> warnings_;
};

}  // namespace

DeepSpeedConfig parse_accelerate_config(const std::string& text, const std::string& name,
                                        const DeepSpeedContext& context) {
  return AccelerateReader(parse_yaml("accelerate", text, name), name, context).read();
}

DeepSpeedConfig read_accelerate_config(const std::string& path, const DeepSpeedContext& context) {
  return AccelerateReader(read_yaml("accelerate", path), path, context).read();
}

}  // namespace kiln
