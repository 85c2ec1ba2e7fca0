#include "interop/foreign_recipe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/error.h"
#include "interop/python_config.h"
#include "run/option_values.h"

namespace kiln {
namespace {

using nlohmann::json;
using ::testing::Contains;
using ::testing::HasSubstr;

// Sana's keys as its repository has them.
constexpr const char* kSana = R"(
data:
  data_dir: [pictures]
  image_size: 512
  caption_proportion: {prompt: 1}
  load_vae_feat: false
  type: SanaWebDatasetMS
model:
  model: SanaMS_600M_P1_D28
  image_size: 512
  mixed_precision: bf16
  load_from:
  resume_from:
  aspect_ratio_type: ASPECT_RATIO_512
  multi_scale: true
  mlp_acts:
    - silu
    - silu
    -
  class_dropout_prob: 0.1
vae: {vae_type: dc-ae, vae_pretrained: nowhere/dc-ae, scale_factor: 0.41407}
text_encoder: {text_encoder_name: gemma-2-2b-it, y_norm: true, y_norm_scale_factor: 0.01, model_max_length: 300}
scheduler: {predict_flow_v: true, noise_schedule: linear_flow, pred_sigma: false, flow_shift: 3.0,
            weighting_scheme: logit_normal, logit_mean: 0.0, logit_std: 1.0, vis_sampler: flow_dpm-solver}
train:
  seed: 1
  train_batch_size: 16
  num_epochs: 100
  gradient_accumulation_steps: 2
  grad_checkpointing: true
  gradient_clip: 0.1
  optimizer: {lr: 1.0e-4, type: CAMEWrapper, weight_decay: 0.0, betas: [0.9, 0.999, 0.9999], eps: [1.0e-30, 1.0e-16]}
  lr_schedule: constant
  lr_schedule_args: {num_warmup_steps: 2000}
  log_interval: 20
  save_model_steps: 500
  work_dir: output/debug
)";

constexpr const char* kPixart = R"(
_base_ = ['../base.py']
data_root = 'toy'
image_list_json = ['data_info.json']
data = dict(
    type='InternalDataMSSigma', root='InternData', image_list_json=image_list_json,
    load_vae_feat=False, load_t5_feat=False)   # what is stored
image_size = 1024
model = 'PixArtMS_XL_2'
mixed_precision = 'fp16'  # ['fp16', 'fp32', 'bf16']
aspect_ratio_type = 'ASPECT_RATIO_1024'
multi_scale = True
pe_interpolation = 2.0
train_batch_size = 2
num_epochs = 3
grad_checkpointing = True
gradient_clip = 0.01
optimizer = dict(type='CAMEWrapper', lr=2e-5, weight_decay=0.0, betas=(0.9, 0.999, 0.9999), eps=(1e-30, 1e-16))
lr_schedule_args = dict(num_warmup_steps=1000)
work_dir = 'output/debug'
model_max_length = 300
class_dropout_prob = 0.1
)";

json options_of(const ForeignRecipe& recipe) {
  TrainOptions options;
  for (const auto& setting : recipe.settings) set_option(options, setting.option, setting.value);
  return to_json(options);
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  EXPECT_NE(text.find(from), std::string::npos) << from;
  return text.replace(text.find(from), from.size(), to);
}

std::string refusal(const std::function<void()>& read) {
  try {
    read();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ForeignRecipe, SanasKeysBecomeOptions) {
  const ForeignRecipe recipe = parse_sana_recipe(kSana, "sana.yaml", {.world_size = 4});
  const json options = options_of(recipe);
  const json expected = json::parse(R"({
      "model": "Sana-600M-512", "image-size": 512, "compute-dtype": "bf16", "buckets": "pixart",
      "text-dropout-prob": 0.1, "text-max-tokens": 300, "objective": "flow", "flow-times": "sana", "flow-shift": 3.0,
      "timestep-sampling": "logit_normal", "seed": 1, "global-batch": 128, "micro-batch": 16, "epochs": 100.0,
      "recompute": "all", "max-grad-norm": 0.1, "optimizer": "came-sana", "weight-decay": 0.0, "beta1": 0.9,
      "beta2": 0.999, "beta3": 0.9999, "came-eps": [1e-30, 1e-16], "lr-schedule": "constant",
      "lr-warmup-steps": 2000, "log-every": 20, "checkpoint-every": 500, "out": "output/debug"})");
  for (const auto& [name, value] : expected.items()) EXPECT_EQ(options.at(name), value) << name;
  EXPECT_DOUBLE_EQ(options.at("lr").get<double>(), 1e-4 * std::sqrt(128 / 256.0));
  EXPECT_THAT(recipe.notes, Contains(HasSubstr("vae_pretrained nowhere/dc-ae")));
  EXPECT_THAT(recipe.notes, Contains(HasSubstr("data_dir [\"pictures\"]: give --data")));
  EXPECT_THAT(recipe.notes, Contains(HasSubstr("auto_lr")));
}

// The rate goes with the batch that is trained, as in the repository.
TEST(ForeignRecipe, TheRateGoesWithTheBatch) {
  const ForeignContext one{.world_size = 1, .global_batch = 4};
  EXPECT_DOUBLE_EQ(options_of(parse_sana_recipe(kSana, "s.yaml", one)).at("lr").get<double>(), 1e-4 / 8);
  const std::string fixed = replaced(kSana, "  lr_schedule: constant", "  auto_lr:\n  lr_schedule: constant");
  EXPECT_EQ(options_of(parse_sana_recipe(fixed, "s.yaml", one)).at("lr"), 1e-4);
}

TEST(ForeignRecipe, SanasModelsAreNamed) {
  const auto model = [](const std::string& from, const std::string& to) {
    return options_of(parse_sana_recipe(replaced(kSana, from, to), "s.yaml", {}));
  };
  EXPECT_EQ(model("SanaMS_600M_P1_D28", "SanaMS_1600M_P1_D20").at("model"), "Sana-1600M-512");
  const json large =
      model("SanaMS_600M_P1_D28\n", "SanaMS_3200M_P1_D40\n  qk_norm: true\n  cross_norm: true\n");
  EXPECT_EQ(large.at("model"), "Sana-1.5-1600M");
  EXPECT_EQ(large.at("depth"), 40);
}

TEST(ForeignRecipe, WhatKilnLacksIsNamed) {
  const auto said = [](const std::string& from, const std::string& to) {
    return refusal([&] { parse_sana_recipe(replaced(kSana, from, to), "s.yaml", {}); });
  };
  EXPECT_THAT(said("SanaMS_600M_P1_D28", "SanaMSCM_600M_P1_D28"),
              HasSubstr("s.yaml: model SanaMSCM_600M_P1_D28"));
  EXPECT_THAT(said("CAMEWrapper", "CAME8BitWrapper"), HasSubstr("optimizer.type \"CAME8BitWrapper\""));
  EXPECT_THAT(said("lr_schedule: constant", "lr_schedule: cosine_decay_to_constant"),
              HasSubstr("lr_schedule"));
  EXPECT_THAT(said("predict_flow_v: true", "predict_flow_v: false"), HasSubstr("predict_flow_v false"));
  EXPECT_THAT(said("ASPECT_RATIO_512", "ASPECT_RATIO_1024"),
              HasSubstr("aspect_ratio_type ASPECT_RATIO_1024"));
  EXPECT_THAT(said("  image_size: 512\n  mixed", "  image_size: 1024\n  mixed"), HasSubstr("image_size"));
  EXPECT_THAT(said("num_epochs: 100", "num_epochs: many"),
              HasSubstr("num_epochs expects a number, got \"many\""));
  const ForeignRecipe recipe =
      parse_sana_recipe(replaced(kSana, "  seed: 1", "  seed: 1\n  gradient_clp: 1"), "s.yaml", {});
  EXPECT_THAT(recipe.notes,
              Contains(HasSubstr("unknown key gradient_clp is left out (the nearest known one is "
                                 "gradient_clip)")));
}

ForeignRecipe pixart_recipe(const std::string& text, const std::string& base, const ForeignContext& context) {
  return translate_pixart_recipe(
      inherit_python_config(parse_python_config(base, "base.py"), parse_python_config(text, "p.py")), "p.py",
      context);
}

TEST(ForeignRecipe, PixartsKeysBecomeOptions) {
  const ForeignRecipe recipe = pixart_recipe(kPixart, "seed = 7\nlog_interval = 50\n", {.world_size = 8});
  const json options = options_of(recipe);
  const json expected = json::parse(R"({
      "model": "PixArt-Sigma-XL/2-1024", "image-size": 1024, "compute-dtype": "fp16", "buckets": "pixart",
      "position-scale": 2.0, "objective": "iddpm", "global-batch": 16, "micro-batch": 2, "epochs": 3.0,
      "recompute": "all", "max-grad-norm": 0.01, "optimizer": "came", "lr-warmup-steps": 1000, "seed": 7,
      "log-every": 50, "text-max-tokens": 300})");
  for (const auto& [name, value] : expected.items()) EXPECT_EQ(options.at(name), value) << name;
  EXPECT_DOUBLE_EQ(options.at("lr").get<double>(), 2e-5 / 4);
  for (const std::string& note : recipe.notes) EXPECT_EQ(note.find("unknown"), std::string::npos) << note;
  const std::string alpha = replaced(kPixart, "model_max_length = 300", "micro_condition = True");
  EXPECT_EQ(options_of(pixart_recipe(alpha, "", {})).at("model"), "PixArt-Alpha-XL/2-1024");
}

TEST(PythonConfig, AssignmentsAreRead) {
  const json read = parse_python_config(
      "# a config\na = 1\nb = -2.5e-3 # rate\nc = 'x' \"y\"\nd = [a, None, True,\n     (1, 2),]\n"
      "e = dict(k={'z': .5}, l=())\nf = (3)\ng = 1_000\n\n",
      "p.py");
  EXPECT_EQ(read, json::parse(R"({"a": 1, "b": -0.0025, "c": "xy", "d": [1, null, true, [1, 2]],
                                  "e": {"k": {"z": 0.5}, "l": []}, "f": 3, "g": 1000})"));
}

TEST(PythonConfig, DictsAreMergedIntoThoseOfTheBase) {
  const json base = json::parse(R"({"a": {"k": 1, "l": {"m": 2, "n": 3}}, "b": {"x": 1}, "c": 4})"),
             config =
                 json::parse(R"({"a": {"l": {"n": 5}}, "b": {"_delete_": true, "y": 2}, "d": {"z": 6}})");
  EXPECT_EQ(inherit_python_config(base, config),
            json::parse(R"({"a": {"k": 1, "l": {"m": 2, "n": 5}}, "b": {"y": 2}, "c": 4, "d": {"z": 6}})"));
}

TEST(PythonConfig, StringsKeepTheirEscapes) {
  EXPECT_EQ(parse_python_config("a = 'x\\n\\'y\\\\z\\d'\n", "p.py").at("a"), "x\n'y\\z\\d");
}

TEST(PythonConfig, NothingElseIs) {
  const auto said = [](const std::string& text) {
    return refusal([&] { parse_python_config(text, "p.py"); });
  };
  for (const char* text :
       {"import os\n", "a = 1 + 2\n", "a = f(1)\n", "a = b\n", "if a:\n  b = 1\n", "a == 1\n", "a = 'x\n",
        "a = [1\n", "a = dict(1=2)\n", "  a = 1\n", "a = 1 b = 2\n", "a.b = 1\n", "a = 1.2.3\n",
        "a = [1 2]\n", "a = '\\x41'\n", "a = {1: 2}\n", "a = __import__('os')\n"})
    EXPECT_THAT(said(std::string("x = 1\n") + text), HasSubstr("p.py line ")) << text;
  EXPECT_THAT(said("x = 1\nimport os\n"), HasSubstr("p.py line 2"));
  EXPECT_THAT(said("x = " + std::string(100'000, '[')), HasSubstr("line 1"));
}

}  // namespace
}  // namespace kiln
