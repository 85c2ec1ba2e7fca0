#include "train/train_config.h"

#include <fmt/ranges.h>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <tuple>
#include <type_traits>

#include "core/block_store.h"
#include "core/error.h"
#include "core/nearest_name.h"
#include "core/tensors.h"
#include "diffusion/objective.h"
#include "optim/ema.h"
#include "optim/optimizer.h"
#include "train/profiler.h"

namespace kiln {

namespace {

void require(bool holds, std::string_view option, std::string_view expected, const auto& value) {
  if (!holds) fail("train", "--{} expects {}, got {}", option, expected, value);
}

void require_one_of(std::string_view option, const std::vector<std::string>& names,
                    const std::string& value) {
  if (std::ranges::find(names, value) == names.end())
    fail("train", "--{} expects one of {}, got '{}'", option, fmt::join(names, ", "), value);
}

std::string toml_value(const nlohmann::json& value) {
  if (!value.is_array()) return value.dump();
  std::string list = "[";
  for (size_t i = 0; i < value.size(); ++i) list += (i ? ", " : "") + value[i].dump();
  return list + "]";
}

template <class T>
bool assign(T& field, const nlohmann::json& value) {
  if constexpr (std::is_same_v<T, bool>) {
    if (!value.is_boolean()) return false;
  } else if constexpr (std::is_same_v<T, std::string>) {
    if (!value.is_string()) return false;
  } else if constexpr (std::is_integral_v<T>) {
    if (!value.is_number_integer()) return false;
    const bool negative = !value.is_number_unsigned() && value.template get<int64_t>() < 0;
    if (std::is_unsigned_v<T> && negative) return false;
  } else if constexpr (std::is_floating_point_v<T>) {
    if (!value.is_number()) return false;
  } else {
    nlohmann::json items = value;
    if (value == "none")  // as on the command line
      items = nlohmann::json::array();
    else if (!value.is_array())
      items = nlohmann::json::array({value});
    T list(items.size());
    for (size_t i = 0; i < items.size(); ++i)
      if (!assign(list[i], items[i])) return false;
    field = std::move(list);
    return true;
  }
  value.get_to(field);
  return true;
}

template <class T>
constexpr const char* type_name() {
  if constexpr (std::is_same_v<T, bool>)
    return "true or false";
  else if constexpr (std::is_same_v<T, std::string>)
    return "a string";
  else if constexpr (std::is_integral_v<T>)
    return "an integer";
  else if constexpr (std::is_floating_point_v<T>)
    return "a number";
  else
    return "a list of numbers";
}

bool is_utf8(const std::string& text) try {
  nlohmann::json(text).dump();
  return true;
} catch (const nlohmann::json::type_error&) {
  return false;
}

void validate_offload(const TrainOptions& o) {
  const bool to_disk = o.offload_optimizer == "nvme" || o.offload_params == "nvme";
  if (to_disk && o.nvme_path.empty())
    fail("train", "--{} nvme needs a folder on the disk: give --nvme-path DIR",
         o.offload_optimizer == "nvme" ? "offload-optimizer" : "offload-params");
  if (to_disk && !std::filesystem::is_directory(o.nvme_path))
    fail("train", "--nvme-path expects a folder that exists, got '{}'", o.nvme_path);
  if (o.offload_params != "none" && o.zero_stage != 3)
    fail("train",
         "--offload-params {} needs --zero-stage 3, got {}: weights are whole on every rank below it",
         o.offload_params, o.zero_stage);
  require(o.nvme_queue_depth > 0 && o.nvme_queue_depth <= BlockStore::kMostQueueDepth, "nvme-queue-depth",
          fmt::format("1 to {}", BlockStore::kMostQueueDepth), o.nvme_queue_depth);
  require(o.nvme_block_size > 0 && o.nvme_block_size % BlockStore::kAlignment == 0 &&
              o.nvme_block_size <= BlockStore::kMostBlockBytes,
          "nvme-block-size",
          fmt::format("a multiple of {} up to {}", BlockStore::kAlignment, BlockStore::kMostBlockBytes),
          o.nvme_block_size);
}

}  // namespace

void validate(const TrainOptions& o) {
  visit_options(o, [](const char* name, const auto& value, OnResume, const char*) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, std::string>)
      if (!is_utf8(value))  // config.toml and the checkpoints could not hold it
        fail("train", "--{} expects UTF-8, got {:?}: rename it, or give a link with another name", name,
             value);
  });
  require(!o.data.empty(), "data", "a feature store, 'synthetic' or a folder of images", "nothing");
  require(!o.out.empty(), "out", "a run folder", "nothing");
  require(o.image_size > 0, "image-size", "a positive number", o.image_size);
  for (const auto& [option, value] : {std::pair{"hidden-size", o.hidden_size},
                                      {"depth", o.depth},
                                      {"num-heads", o.num_heads},
                                      {"patch-size", o.patch_size},
                                      {"num-classes", o.num_classes}})
    require(value >= 0, option, "0 or more", value);
  require(o.global_batch > 0, "global-batch", "a positive number", o.global_batch);
  require(o.micro_batch >= -1 && o.micro_batch <= o.global_batch, "micro-batch",
          fmt::format("0 to --global-batch ({}), or -1", o.global_batch), o.micro_batch);
  // Beyond them is a slip of the finger, and machines fail in odd ways. Larger whole numbers than 64 bits
  // hold arrive as the largest.
  constexpr int64_t kMillion = 1'000'000;
  for (const auto& [option, value, most] : {std::tuple{"image-size", o.image_size, int64_t{65536}},
                                            {"hidden-size", o.hidden_size, kMillion},
                                            {"depth", o.depth, int64_t{10'000}},
                                            {"num-heads", o.num_heads, kMillion},
                                            {"patch-size", o.patch_size, int64_t{65536}},
                                            {"num-classes", o.num_classes, 1000 * kMillion},
                                            {"global-batch", o.global_batch, 1000 * kMillion},
                                            {"prefetch", o.prefetch, kMillion},
                                            {"num-samples", o.num_samples, kMillion},
                                            {"num-sampling-steps", o.num_sampling_steps, kMillion},
                                            {"threads", o.threads, int64_t{1024}},
                                            {"loader-threads", o.loader_threads, int64_t{1024}},
                                            {"nproc", o.nproc, int64_t{1024}}})
    require(value <= most, option, fmt::format("{} at most", most), value);
  if (chooses_micro_batch(o) && o.memory_budget.empty())
    fail("train", "--micro-batch -1 chooses what fits a memory budget: give --memory-budget auto");
  require(o.max_steps > 0, "max-steps", "a positive number", o.max_steps);
  require(o.max_minutes >= 0 && std::isfinite(o.max_minutes), "max-minutes", "0 or more", o.max_minutes);
  require(o.class_dropout_prob >= 0 && o.class_dropout_prob < 1, "class-dropout-prob", "a number in [0, 1)",
          o.class_dropout_prob);
  require(o.max_grad_norm >= 0, "max-grad-norm", "0 or more", o.max_grad_norm);
  for (double decay : o.ema_decay) require(decay >= 0 && decay < 1, "ema-decay", "numbers in [0, 1)", decay);
  for (size_t i = 0; i < o.ema_decay.size(); ++i)
    require(std::ranges::count(o.ema_decay, o.ema_decay[i]) == 1, "ema-decay", "different decays",
            fmt::format("{} twice", o.ema_decay[i]));
  require_one_of("ema-schedule", ema_schedule_names(), o.ema_schedule);
  require_one_of("objective", objective_names(), o.objective);
  require_one_of("optimizer", optimizer_names(), o.optimizer);
  require_one_of("device", {"auto", "cpu", "cuda"}, o.device);
  require_one_of("compute-dtype", {"f32", "bf16", "fp16"}, o.compute_dtype);
  validate(lr_schedule_of(o));
  validate(loss_scaler_options_of(o));
  require(o.log_every > 0, "log-every", "a positive number", o.log_every);
  require(o.checkpoint_every >= 0, "checkpoint-every", "0 or more", o.checkpoint_every);
  require(o.keep_checkpoints >= 0, "keep-checkpoints", "0 or more", o.keep_checkpoints);
  require(o.validate_every >= 0, "validate-every", "0 or more", o.validate_every);
  require(o.validation_images >= 0, "validation-images", "0 or more", o.validation_images);
  require(o.sample_every >= 0, "sample-every", "0 or more", o.sample_every);
  require(o.num_samples > 0, "num-samples", "a positive number", o.num_samples);
  require(o.num_sampling_steps > 0, "num-sampling-steps", "a positive number", o.num_sampling_steps);
  require(std::isfinite(o.cfg_scale), "cfg-scale", "a number", o.cfg_scale);
  require(o.peak_tflops >= 0 && std::isfinite(o.peak_tflops), "peak-tflops", "0 or more", o.peak_tflops);
  require(o.max_bad_steps >= 0, "max-bad-steps", "0 or more", o.max_bad_steps);
  require(o.threads >= 0, "threads", "0 or more", o.threads);
  require(o.loader_threads > 0, "loader-threads", "a positive number", o.loader_threads);
  require(o.prefetch > 0, "prefetch", "a positive number", o.prefetch);
  require(o.nproc >= 0, "nproc", "0 or more", o.nproc);
  require(o.zero_stage >= 0 && o.zero_stage <= 3, "zero-stage", "0, 1, 2 or 3", o.zero_stage);
  require(o.persist_threshold >= 0, "persist-threshold", "0 or more", o.persist_threshold);
  require(o.prefetch_segments >= 0, "prefetch-segments", "0 or more", o.prefetch_segments);
  require(o.reduce_bucket_size >= 0, "reduce-bucket-size", "0 or more", o.reduce_bucket_size);
  require(o.collective_timeout > 0, "collective-timeout", "a positive number of seconds",
          o.collective_timeout);
  if (!o.reduce_dtype.empty()) require_one_of("reduce-dtype", {"f32", "bf16", "fp16"}, o.reduce_dtype);
  require_one_of("offload-optimizer", {"none", "cpu", "nvme"}, o.offload_optimizer);
  require_one_of("checkpoint-copy", {"auto", "memory", "page-cache"}, o.checkpoint_copy);
  require_one_of("offload-params", {"none", "cpu", "nvme"}, o.offload_params);
  for (const auto& [option, price] :
       {std::pair{"cost-per-hour", o.cost_per_hour}, {"price-per-gpu-hour", o.price_per_gpu_hour}})
    require(price >= 0 && std::isfinite(price), option, "0 or more", price);
  if (o.cost_per_hour > 0 && o.price_per_gpu_hour > 0)
    fail("train", "--cost-per-hour and --price-per-gpu-hour both say what an hour costs: give one");
  validate_offload(o);
  if (!o.profile.empty()) parse_profile(o.profile);
  objective_config_of(o);
  optimizer_config_of(o);
}

void set_option(TrainOptions& options, const std::string& name, const nlohmann::json& value) {
  bool known = false;
  std::vector<std::string> names;
  visit_options(options, [&](const char* option, auto& field, OnResume, const char*) {
    names.push_back(option);
    if (name != option) return;
    known = true;
    if (!assign(field, value))
      fail("train", "{} expects {}, got {}", name, type_name<std::remove_cvref_t<decltype(field)>>(),
           value.dump());
  });
  if (!known) fail("train", "unknown option '{}': did you mean '{}'?", name, nearest_name(name, names));
}

nlohmann::json to_json(const TrainOptions& options) {
  nlohmann::json json = nlohmann::json::object();
  visit_options(options,
                [&](const char* name, const auto& value, OnResume, const char*) { json[name] = value; });
  return json;
}

std::string to_toml(const TrainOptions& options) {
  std::string toml;
  visit_options(options, [&](const char* name, const auto& value, OnResume, const char*) {
    toml += fmt::format("{} = {}\n", name, toml_value(nlohmann::json(value)));
  });
  return toml;
}

namespace {

// The same JSON may be written in several ways.
bool are_same(const nlohmann::json& saved, const nlohmann::json& now) {
  if (saved == now || !saved.is_string() || !now.is_string()) return saved == now;
  const auto parsed = [](const nlohmann::json& value) {
    return nlohmann::json::parse(value.get<std::string>(), nullptr, /*allow_exceptions=*/false);
  };
  return parsed(saved).is_object() && parsed(saved) == parsed(now);
}

}  // namespace

OptionChanges compare_options(const nlohmann::json& saved, const nlohmann::json& now) {
  OptionChanges changes;
  TrainOptions table;
  visit_options(table, [&](const char* name, const auto&, OnResume on_resume, const char*) {
    if (on_resume == OnResume::kHarmless || !saved.contains(name) || are_same(saved.at(name), now.at(name)))
      return;
    (on_resume == OnResume::kRefuse ? changes.refused : changes.warned)
        .push_back(fmt::format("--{} ({} -> {})", name, saved.at(name).dump(), now.at(name).dump()));
  });
  return changes;
}

LrSchedule lr_schedule_of(const TrainOptions& o) {
  return {.name = o.lr_schedule,
          .lr = o.lr,
          .warmup = o.lr_warmup,
          .warmup_steps = o.lr_warmup_steps,
          .min_lr_ratio = o.min_lr_ratio};
}

LossScalerOptions loss_scaler_options_of(const TrainOptions& o) {
  return {.fixed_scale = o.loss_scale,
          .initial_scale = o.loss_scale_initial,
          .min_scale = o.loss_scale_min,
          .growth_interval = o.loss_scale_window,
          .hysteresis = o.loss_scale_hysteresis,
          .consecutive_hysteresis = o.loss_scale_consecutive};
}

nlohmann::json objective_config_of(const TrainOptions& o) {
  nlohmann::json config = objective_config(o.objective);
  const TrainOptions defaults;
  const bool flow = config.at("type") == "flow", ddpm = config.at("type") == "ddpm";
  const auto set = [&](bool applies, const char* option, const char* key, const auto& value,
                       const auto& default_value) {
    if (value == default_value) return;
    if (!applies) fail("train", "--{} has no effect with --objective {}: leave it out", option, o.objective);
    config[key] = value;
  };
  set(flow, "timestep-sampling", "timestep_sampling", o.timestep_sampling, defaults.timestep_sampling);
  set(flow, "weighting", "weighting", o.weighting, defaults.weighting);
  set(flow, "logit-mean", "logit_mean", o.logit_mean, defaults.logit_mean);
  set(flow, "logit-std", "logit_std", o.logit_std, defaults.logit_std);
  set(flow, "flow-shift", "shift", o.flow_shift, defaults.flow_shift);
  set(ddpm, "snr-gamma", "snr_gamma", o.snr_gamma, defaults.snr_gamma);
  make_objective(config);
  return config;
}

nlohmann::json optimizer_config_of(const TrainOptions& o) {
  const nlohmann::json config = {{"type", o.optimizer},
                                 {"betas", {o.beta1, o.beta2}},
                                 {"eps", o.adam_eps},
                                 {"weight_decay", o.weight_decay}};
  make_optimizer(config);
  return config;
}

}  // namespace kiln
