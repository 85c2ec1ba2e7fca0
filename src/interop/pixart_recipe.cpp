// The Python configs of PixArt-alpha and PixArt-sigma.
#include "interop/foreign_recipe.h"
#include "interop/recipe_reader.h"

namespace kiln {

using nlohmann::json;

namespace {

// What the repository's base config (configs/PixArt_xl2_internal.py) says of the keys that are read here.
constexpr const char* kPixartDefaults = R"({
  "data": {}, "image_size": 256, "train_batch_size": 32, "use_fsdp": false, "valid_num": 0, "model": "PixArt_XL_2",
  "aspect_ratio_type": null, "multi_scale": false, "pe_interpolation": 1.0, "qk_norm": false, "kv_compress": false,
  "kv_compress_config": null, "train_sampling_steps": 1000, "model_max_length": 120, "num_epochs": 80,
  "gradient_accumulation_steps": 1, "grad_checkpointing": false, "gradient_clip": 1.0, "auto_lr": {"rule": "sqrt"},
  "optimizer": {"type": "AdamW", "lr": 1e-4, "weight_decay": 3e-2, "eps": 1e-10}, "lr_schedule": "constant",
  "lr_schedule_args": {"num_warmup_steps": 500}, "mixed_precision": "fp16", "scale_factor": 0.18215,
  "vae_pretrained": null, "load_from": null, "resume_from": null, "snr_loss": false, "class_dropout_prob": 0.1,
  "work_dir": "/cache/exps/", "micro_condition": false, "seed": 43, "skip_step": 0, "log_interval": 50,
  "load_vae_feat": false, "load_t5_feat": false})";

constexpr int64_t kSigmaTokens = 300, kAlphaTokens = 120;  // model_max_length of the two kinds

std::string size_name(const RecipeReader& reader, int64_t image_size) {
  if (image_size == 2048) return "2K";
  if (image_size == 256 || image_size == 512 || image_size == 1024) return std::to_string(image_size);
  reader.refuse("image_size {}: the published sizes are 256, 512, 1024 and 2048", image_size);
}

void read_pixart_model(RecipeReader& reader) {
  reader.only("model", {"PixArt_XL_2", "PixArtMS_XL_2"}, "write PixArt_XL_2 or PixArtMS_XL_2");
  const int64_t tokens = reader.integer("model_max_length");
  if (tokens != kSigmaTokens && tokens != kAlphaTokens)
    reader.refuse("model_max_length {}: {} is PixArt-sigma's, {} is PixArt-alpha's", tokens, kSigmaTokens,
                  kAlphaTokens);
  const int64_t image_size = reader.integer("image_size");
  const bool is_sigma = tokens == kSigmaTokens, compresses = reader.flag("kv_compress");
  json config = {{"variant", reader.text("model").starts_with("PixArtMS") ? "PixArtMS" : "PixArt"},
                 {"micro_condition", reader.flag("micro_condition")},
                 {"qk_norm", reader.flag("qk_norm")}};
  if (compresses) config["kv_compress_config"] = reader.value("kv_compress_config");
  reader.set("model",
             fmt::format("PixArt-{}-XL/2-{}", is_sigma ? "Sigma" : "Alpha", size_name(reader, image_size)),
             "model, model_max_length, image_size");
  reader.set("model-config", config.dump(), "model, micro_condition, qk_norm, kv_compress_config");
  reader.set("position-scale", reader.number("pe_interpolation"), "pe_interpolation");
  reader.set("objective", "iddpm", "train_sampling_steps");
  reader.only("train_sampling_steps", {1000}, "Kiln has 1,000 timesteps");
}

// Takes the keys of data = dict(...) to the others.
void take_data(json& config, std::set<std::string>& given) {
  if (!config["data"].is_object()) return;
  for (const auto& [key, value] : config["data"].items()) {
    config[key] = value;
    given.insert(key);
  }
}

}  // namespace

ForeignRecipe translate_pixart_recipe(const json& file, const std::string& name,
                                      const ForeignContext& context) {
  std::set<std::string> given;
  for (const auto& [key, value] : file.items()) given.insert(key);
  json config = inherit_python_config(json::parse(kPixartDefaults), file);
  take_data(config, given);
  RecipeReader reader(config, given, name, context);
  read_pixart_model(reader);
  reader.read_training("came");
  const json root = reader.value("data_root");
  reader.note(fmt::format("data_root {}: give --data, a folder of pictures or a store", root.dump()));
  reader.read_autoencoder("give");
  reader.leave(
      "_base_ data root image_list_json scale_factor num_group_tokens tensorboard_mox_interval "
      "s3_work_dir kv_compress_config load_mask_index tiny_vae_pretrained");
  return reader.finish();
}

}  // namespace kiln
