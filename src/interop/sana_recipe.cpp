// The YAML configs of NVlabs/Sana.
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <regex>

#include "core/text/json_text.h"
#include "core/text/yaml.h"
#include "interop/recipe_reader.h"

namespace kiln {

using nlohmann::json;

namespace {

// What the repository takes for keys that a file leaves out (diffusion/utils/config.py).
constexpr const char* kSanaDefaults = R"({
  "load_text_feat": false, "load_vae_feat": false, "load_t5_feat": false, "image_size": 512, "valid_num": 0,
  "model": "SanaMS_600M_P1_D28", "mixed_precision": "fp16", "load_from": null, "resume_from": null,
  "aspect_ratio_type": "ASPECT_RATIO_1024", "multi_scale": true, "pe_interpolation": 1.0, "micro_condition": false,
  "attn_type": "linear", "ffn_type": "glumbconv", "mlp_acts": ["silu", "silu", null], "mlp_ratio": 2.5,
  "use_pe": false, "qk_norm": false, "class_dropout_prob": 0.0, "linear_head_dim": 32, "cross_norm": false,
  "vae_pretrained": null, "scale_factor": 0.41407, "vae_latent_dim": 32, "vae_downsample_rate": 32,
  "text_encoder_name": "gemma-2-2b-it", "caption_channels": 2304, "y_norm": true, "y_norm_scale_factor": 0.01,
  "model_max_length": 300, "chi_prompt": [], "train_sampling_steps": 1000, "predict_v": true, "predict_flow_v": true,
  "noise_schedule": "linear_flow", "pred_sigma": false, "flow_shift": 1.0, "weighting_scheme": "logit_normal",
  "logit_mean": 0.0, "logit_std": 1.0, "seed": 43, "train_batch_size": 32, "num_epochs": 100,
  "gradient_accumulation_steps": 1, "grad_checkpointing": false, "gradient_clip": 1.0,
  "optimizer": {"type": "AdamW", "lr": 0.0001, "weight_decay": 0.03, "eps": 1e-10},
  "lr_schedule": "constant", "lr_schedule_args": {"num_warmup_steps": 500}, "auto_lr": {"rule": "sqrt"},
  "use_fsdp": false, "snr_loss": false, "log_interval": 50, "skip_step": 0, "work_dir": "output/"})";

constexpr const char* kSections[] = {"data", "model", "vae", "text_encoder", "scheduler", "train"};

struct Flat {
  json config = json::parse(kSanaDefaults);
  std::set<std::string> given;
};

Flat flattened(const json& file, const std::string& name) {
  Flat flat;
  const auto take = [&](const std::string& key, const json& value) {
    if (flat.given.contains(key) && key == "image_size" && flat.config[key] != value)
      fail("recipe", "{}: image_size of data and of model differ: {} and {}", name, brief(flat.config[key]),
           brief(value));
    flat.config[key] = value;
    flat.given.insert(key);
  };
  for (const auto& [key, value] : file.items()) {
    const bool is_section = std::ranges::find(kSections, key) != std::end(kSections);
    if (is_section && !value.is_object() && !value.is_null())
      fail("recipe", "{}: {} expects keys below it, got {}", name, key, brief(value));
    if (!is_section)
      take(key, value);
    else if (value.is_object())
      for (const auto& [below, its_value] : value.items()) take(below, its_value);
  }
  return flat;
}

const char* size_suffix(int64_t image_size, bool is_large) {
  if (image_size == 512) return "-512";
  if (is_large && image_size == 2048) return "-2K";
  if (is_large && image_size == 4096) return "-4K";
  return "";
}

void read_sana_model(RecipeReader& reader) {
  const std::string model = reader.text("model");
  static const std::regex kName("Sana(?:MS)?_(600|1600|3200|4800)M_P([124])_D([0-9]{1,3})");
  std::smatch match;
  if (!std::regex_match(model, match, kName))
    reader.refuse(
        "model {}: Kiln trains SanaMS_600M_P1_D28, SanaMS_1600M_P1_D20 and the like, without "
        "ControlNet, video or distillation",
        model);
  const bool is_large = match[1] != "600", has_norm = reader.flag("qk_norm");
  const int64_t image_size = reader.integer("image_size"), depth = std::stoll(match[3]);
  if (has_norm != reader.flag("cross_norm"))
    reader.refuse(
        "qk_norm and cross_norm differ: Kiln norms the queries and keys of all attention or of none");
  json config = json::object();
  int64_t own_depth = is_large ? 20 : 28;
  std::string name = std::string(is_large ? "Sana-1600M" : "Sana-600M") + size_suffix(image_size, is_large);
  if (has_norm && is_large) {
    own_depth = depth == 60 ? 60 : 20;
    name = depth == 60 ? "Sana-1.5-4800M" : "Sana-1.5-1600M";
  } else if (has_norm) {
    config["qk_norm"] = "rms_norm_across_heads";
  }
  if (reader.number("mlp_ratio") != 2.5) config["mlp_ratio"] = reader.number("mlp_ratio");
  reader.set("model", name, "model");
  if (!config.empty()) reader.set("model-config", config.dump(), "qk_norm, mlp_ratio");
  if (depth != own_depth) reader.set("depth", depth, "model");
  if (match[2] != "1") reader.set("patch-size", std::stoll(match[2]), "model");
  if (reader.flag("use_pe"))
    reader.set("position-scale", reader.number("pe_interpolation"), "pe_interpolation");
  const std::string fixed = "Kiln's Sana has another value";
  reader.only("attn_type", {"linear", "triton_linear"}, fixed);
  reader.only("ffn_type", {"glumbconv"}, fixed);
  reader.only("mlp_acts", {json::parse(R"(["silu", "silu", null])")}, fixed);
  reader.only("linear_head_dim", {32}, fixed);
  reader.only("micro_condition", {false}, fixed);
  reader.only("caption_channels", {2304}, fixed);
  reader.only("y_norm", {true}, fixed);
  reader.only("y_norm_scale_factor", {0.01}, fixed);
}

void read_sana_objective(RecipeReader& reader) {
  reader.only("noise_schedule", {"linear_flow"}, "Kiln trains Sana with flow matching");
  reader.only("predict_v", {true}, "Kiln's flow predicts the velocity");
  reader.only("predict_flow_v", {true}, "Kiln's flow predicts the velocity");
  reader.only("pred_sigma", {false}, "a flow has no sigma to learn");
  reader.only("train_sampling_steps", {1000}, "Kiln has 1,000 timesteps");
  reader.only("weighting_scheme", {"logit_normal", "uniform", nullptr}, "write logit_normal or uniform");
  const bool is_uniform = reader.value("weighting_scheme") != "logit_normal";
  reader.set("objective", "flow", "noise_schedule");
  reader.set("flow-times", "sana", "train_sampling_steps");
  reader.set("flow-shift", reader.number("flow_shift"), "flow_shift");
  reader.set("timestep-sampling", is_uniform ? "uniform" : "logit_normal", "weighting_scheme");
  reader.set("logit-mean", reader.number("logit_mean"), "logit_mean");
  reader.set("logit-std", reader.number("logit_std"), "logit_std");
}

void read_sana_data(RecipeReader& reader) {
  const json folders = reader.value("data_dir");
  const bool is_one = folders.is_array() && folders.size() == 1 && folders[0].is_string();
  if (is_one && std::filesystem::exists(folders[0].get<std::string>()))
    reader.set("data", folders[0], "data_dir");
  else
    reader.note(
        fmt::format("data_dir {}: give --data, a folder or a store with all these pictures", folders.dump()));
  if (reader.flag("load_text_feat"))
    reader.note("load_text_feat: kiln extract stores the features of captions with those of pictures");
  reader.read_autoencoder("download it in diffusers' format and give");
  reader.only("scale_factor", {0.41407}, "the autoencoder's own config says its factor: leave it at 0.41407");
  reader.only("vae_latent_dim", {32}, "Kiln's Sana takes latents of DC-AE f32c32");
  reader.only("vae_downsample_rate", {32}, "Kiln's Sana takes latents of DC-AE f32c32");
  if (reader.value("text_encoder_name") != "gemma-2-2b-it")
    reader.note(fmt::format("text_encoder_name {}: give --text-encoder FOLDER, which encodes the captions",
                            reader.value("text_encoder_name").dump()));
}

}  // namespace

ForeignRecipe parse_sana_recipe(const std::string& text, const std::string& name,
                                const ForeignContext& context) {
  const auto [config, given] = flattened(parse_yaml("recipe", text, name), name);
  RecipeReader reader(config, given, name, context);
  read_sana_model(reader);
  read_sana_objective(reader);
  read_sana_data(reader);
  reader.read_training("came-sana");
  // The trainer joins the lines of its instruction.
  if (const auto lines = reader.get<std::vector<std::string>>("chi_prompt", "lines of text"); !lines.empty())
    reader.set("caption-instruction", fmt::format("{}", fmt::join(lines, "\n")), "chi_prompt",
               /*is_of_pictures=*/true);
  if (config.contains("training_hours") && reader.number("training_hours") < 10000)
    reader.set("max-minutes", 60 * reader.number("training_hours"), "training_hours");
  reader.leave(
      "caption_proportion external_caption_suffixes external_clipscore_suffixes clip_thr_temperature "
      "clip_thr del_img_clip_thr sort_dataset buckets_file hq_only autocast_linear_attn guidance_type "
      "pag_applied_layers pe_interpolation vae_type weight_dtype vis_sampler learn_sigma null_embed_root "
      "valid_prompt_embed_root local_save_vis online_metric eval_metric_step online_metric_dir "
      "resume_lr_scheduler load_from_optimizer load_from_lr_scheduler training_hours early_stop_hours "
      "debug caching report_to tracker_project_name name loss_report_name extra data");
  return reader.finish();
}

}  // namespace kiln
