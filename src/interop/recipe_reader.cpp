#include "interop/recipe_reader.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/text/json_text.h"
#include "core/text/nearest_name.h"
#include "core/text/split.h"

namespace kiln {

using nlohmann::json;

namespace {

constexpr double kBaseBatch = 256;  // of the repositories' auto_lr

}  // namespace

RecipeReader::RecipeReader(json config, std::set<std::string> given, const std::string& name,
                           const ForeignContext& context)
    : config_(std::move(config)), given_(std::move(given)), name_(name), context_(context) {}

void RecipeReader::set(const std::string& option, const json& value, const std::string& key,
                       bool is_of_pictures) {
  recipe_.settings.push_back(
      {.option = option, .value = value, .key = key, .is_of_pictures = is_of_pictures});
}

const json& RecipeReader::value(const std::string& key) {
  static const json kNothing;
  read_.insert(key);
  const auto found = config_.find(key);
  return found == config_.end() ? kNothing : *found;
}

void RecipeReader::only(const std::string& key, const std::vector<json>& values, const std::string& advice) {
  const json& given = value(key);
  if (std::ranges::find(values, given) == values.end()) refuse("{} {}: {}", key, brief(given), advice);
}

void RecipeReader::leave(const std::string& keys) {
  for (const std::string& key : words_in(keys)) read_.insert(key);
}

void RecipeReader::read_batch() {
  const int64_t batch = integer("train_batch_size"), passes = integer("gradient_accumulation_steps");
  if (batch < 1 || passes < 1) refuse("train_batch_size and gradient_accumulation_steps expect 1 or more");
  global_batch_ = context_.global_batch > 0 ? context_.global_batch : batch * passes * context_.world_size;
  set("global-batch", global_batch_, "train_batch_size x gradient_accumulation_steps x ranks");
  set("micro-batch", std::min(batch, global_batch_), "train_batch_size");
  set("epochs", number("num_epochs"), "num_epochs");
  set("recompute", flag("grad_checkpointing") ? "all" : "none", "grad_checkpointing");
  set("max-grad-norm", number("gradient_clip"), "gradient_clip");
  if (flag("use_fsdp")) set("zero-stage", 3, "use_fsdp");
}

// The repositories multiply their rate by the batch of all ranks before training.
double RecipeReader::rate_for_batch(double rate) {
  const json rule = value("auto_lr");
  if (!rule.is_object()) return rate;
  const double ratio = static_cast<double>(global_batch_) / kBaseBatch;
  const json name = rule.value("rule", json());
  if (name != "sqrt" && name != "linear")
    refuse("auto_lr expects the rule sqrt or linear, got {}", brief(rule));
  const double scaled = rate * (name == "sqrt" ? std::sqrt(ratio) : ratio);
  note(fmt::format("auto_lr: {:g} becomes {:.3g} at a global batch of {} ({} of batch / 256)", rate, scaled,
                   global_batch_, name.get<std::string>()));
  return scaled;
}

void RecipeReader::read_optimizer(const std::string& came) {
  const json optimizer = value("optimizer");
  if (!optimizer.is_object() || !optimizer.contains("type"))
    refuse("optimizer expects type, lr, ..., got {}", brief(optimizer));
  const json& type = optimizer["type"];
  const bool is_came = type == "CAMEWrapper" || type == "CAME";
  if (!is_came && type != "AdamW" && type != "AdamW8bit")
    refuse("optimizer.type {}: write AdamW, AdamW8bit or CAMEWrapper, which --optimizer has", brief(type));
  set("optimizer", is_came ? came : type == "AdamW" ? "adamw" : "adamw-8bit", "optimizer.type");
  try {
    set("lr", rate_for_batch(optimizer.value("lr", 1e-4)), "optimizer.lr");
    set("weight-decay", optimizer.value("weight_decay", is_came ? 0.0 : 0.01), "optimizer.weight_decay");
    const auto betas =
        optimizer.value("betas", is_came ? std::vector{0.9, 0.999, 0.9999} : std::vector{0.9, 0.999});
    if (betas.size() != (is_came ? 3 : 2)) refuse("optimizer.betas expects {} numbers", is_came ? 3 : 2);
    for (size_t i = 0; i < betas.size(); ++i) set(fmt::format("beta{}", i + 1), betas[i], "optimizer.betas");
    if (is_came)
      set("came-eps", optimizer.value("eps", std::vector{1e-30, 1e-16}), "optimizer.eps");
    else
      set("adam-eps", optimizer.value("eps", 1e-8), "optimizer.eps");
  } catch (const json::exception&) {
    refuse("optimizer has a value of a wrong type: {}", brief(optimizer));
  }
  for (const auto& [key, unused] : optimizer.items())
    if (key != "type" && key != "lr" && key != "weight_decay" && key != "betas" && key != "eps")
      note(fmt::format("optimizer.{} is left out: Kiln has no such option", key));
}

void RecipeReader::read_schedule() {
  only("lr_schedule", {"constant", "cosine"}, "write constant or cosine (--lr-schedule)");
  set("lr-schedule", value("lr_schedule"), "lr_schedule");
  const json arguments = value("lr_schedule_args");
  if (arguments.is_null()) return;
  if (!arguments.is_object() || !is_integer(arguments.value("num_warmup_steps", json(0))))
    refuse("lr_schedule_args expects num_warmup_steps, got {}", brief(arguments));
  set("lr-warmup-steps", arguments.value("num_warmup_steps", int64_t{0}),
      "lr_schedule_args.num_warmup_steps");
}

void RecipeReader::read_files() {
  if (const json weights = value("load_from"); !weights.is_null()) {
    const std::string path = text("load_from");
    if (std::filesystem::exists(path))
      set("weights", path, "load_from");
    else
      note(fmt::format(
          "load_from {}: no such file; download it (kiln download --list) and give --weights FILE", path));
  }
  const json resumed = value("resume_from");
  if (!resumed.is_null() && !(resumed.is_object() && resumed.value("checkpoint", json()).is_null()))
    note(fmt::format("resume_from {}: give --weights FILE; the optimizer starts anew", resumed.dump()));
  set("out", text("work_dir"), "work_dir");
  set("log-every", integer("log_interval"), "log_interval");
  if (given_.contains("save_model_steps"))
    set("checkpoint-every", integer("save_model_steps"), "save_model_steps");
  if (given_.contains("ema_rate")) set("ema-decay", number("ema_rate"), "ema_rate");
  if (given_.contains("visualize") && flag("visualize"))
    note(fmt::format("visualize: --sample-every {} --sample-prompts \"...\" draws grids",
                     value("eval_sampling_steps").dump()));
  const bool has_latents = flag("load_vae_feat"), has_captions = flag("load_t5_feat");
  if (has_latents || has_captions)
    note(
        "stored features: make a store (kiln extract; kiln store import for fast-DiT's) and give --data "
        "STORE");
}

void RecipeReader::read_autoencoder(const std::string& advice) {
  const json path = value("vae_pretrained");
  if (!path.is_string()) return;
  if (std::filesystem::is_directory(path.get<std::string>()))
    set("autoencoder", path, "vae_pretrained", /*is_of_pictures=*/true);
  else
    note(fmt::format("vae_pretrained {}: no such folder; {} --autoencoder FOLDER if --data holds pictures",
                     path.get<std::string>(), advice));
}

void RecipeReader::read_training(const std::string& came) {
  read_batch();
  read_optimizer(came);
  read_schedule();
  read_files();
  set("image-size", integer("image_size"), "image_size");
  set("text-dropout-prob", number("class_dropout_prob"), "class_dropout_prob");
  set("seed", integer("seed"), "seed");
  only("mixed_precision", {"fp16", "bf16", "fp32", "no"}, "write fp16, bf16 or fp32 (--compute-dtype)");
  const std::string precision = text("mixed_precision");
  set("compute-dtype", precision == "fp32" || precision == "no" ? "f32" : precision, "mixed_precision");
  set("text-max-tokens", integer("model_max_length"), "model_max_length", /*is_of_pictures=*/true);
  if (flag("multi_scale")) {
    const std::string table = text("aspect_ratio_type");
    if (table != fmt::format("ASPECT_RATIO_{}", integer("image_size")))
      refuse("aspect_ratio_type {} is no table of image_size {}: make them agree", table,
             integer("image_size"));
    set("buckets", "pixart", "multi_scale, aspect_ratio_type", /*is_of_pictures=*/true);
    if (integer("valid_num") > 1)
      set("bucket-min", integer("valid_num"), "valid_num", /*is_of_pictures=*/true);
  }
  only("snr_loss", {false}, "Kiln has min-SNR for --objective epsilon only (--snr-gamma)");
  only("skip_step", {0}, "a run that is resumed goes on where it was");
  leave(
      "fp32_attention gc_step eval_batch_size use_flash_attn eval_sampling_steps lora_rank mask_type "
      "mask_loss_coef load_mask_index save_image_epochs save_model_epochs validation_prompts "
      "deterministic_validation loss_type huber_c num_ddim_timesteps w_max w_min ema_decay num_workers "
      "visualize save_model_steps ema_rate debug_nan aspect_ratio_type valid_num cfg_scale "
      "sample_posterior type transform real_prompt_ratio");
}

ForeignRecipe RecipeReader::finish() {
  const std::vector<std::string> known(read_.begin(), read_.end());
  for (const std::string& key : given_)
    if (!read_.contains(key))
      note(fmt::format("unknown key {} is left out (the nearest known one is {})", key,
                       nearest_name(key, known)));
  return recipe_;
}

}  // namespace kiln
