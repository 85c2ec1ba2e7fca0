#include "interop/deepspeed_config.h"

#include <set>

#include "interop/deepspeed_keys.h"
#include "test_files.h"
#include "train/settings.h"

namespace kiln {
namespace {

using nlohmann::json, ::testing::Contains;

TrainOptions with(const char* settings) { return changed({}, settings); }

struct Given {
  TrainOptions options{};
  std::set<std::string> names{};  // on the command line
  int64_t world_size = 1;
};

DeepSpeedConfig parse(const std::string& text, const Given& given = {}) {
  return parse_deepspeed_config(
      text, "ds.json",
      {.ours = given.options,
       .is_given = [&](const std::string& name) { return given.names.contains(name); },
       .world_size = given.world_size});
}

TrainOptions options_of(const std::string& text, const Given& given = {}) {
  return apply(parse(text, given), given.options);
}

void expect_refused(const std::string& text, const std::vector<std::string>& parts, const Given& given = {}) {
  for (const std::string& part : parts) EXPECT_ERROR(parse(text, given), part) << text;
}

// As the guides on training Stable Diffusion with DeepSpeed have it.
constexpr const char* kGuides = R"({
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": 4,
  "optimizer": {"type": "AdamW",
                "params": {"lr": 1e-5, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 1e-2}},
  "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 16, "hysteresis": 2,
           "min_loss_scale": 1},
  "gradient_clipping": 1.0,
  "zero_optimization": {"stage": 2,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "contiguous_gradients": true, "overlap_comm": true, "reduce_scatter": true,
    "reduce_bucket_size": 5e7, "allgather_bucket_size": 5e7},
  "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true},
  "steps_per_print": 50,
  "wall_clock_breakdown": true
})";

TEST(DeepSpeedConfig, TheGuidesFileBecomesOptions) {
  const Given given{.options = with("global-batch=64"), .world_size = 2};
  const DeepSpeedConfig config = parse(kGuides, given);
  const TrainOptions options = apply(config, given.options);
  EXPECT_EQ(options.global_batch, 64);
  EXPECT_EQ(options.micro_batch, 8);  // 64 / (4 x 2)
  EXPECT_EQ(options.optimizer.name, "adamw");
  EXPECT_EQ(options.lr.peak, 1e-5);
  EXPECT_EQ(options.optimizer.beta2, 0.99);
  EXPECT_EQ(options.optimizer.eps, 1e-8);
  EXPECT_EQ(options.optimizer.weight_decay, 1e-2);
  EXPECT_EQ(options.compute.dtype, at::kHalf);
  EXPECT_EQ(options.loss_scale.fixed_scale, 0);
  EXPECT_EQ(options.loss_scale.initial_scale, 65536);
  EXPECT_EQ(options.loss_scale.growth_interval, 500);
  EXPECT_EQ(options.loss_scale.hysteresis, 2);
  EXPECT_EQ(options.optimizer.max_grad_norm, 1);
  EXPECT_EQ(options.zero.stage, 2);
  EXPECT_EQ(options.offload.optimizer, Placement::kHost);
  EXPECT_EQ(options.zero.reduce_bucket_size, 50000000);
  EXPECT_EQ(options.memory.offload_activations, SegmentSet::all());
  EXPECT_EQ(options.watch.log_every, 50);
  EXPECT_THAT(config.warnings,
              ElementsAre(has_all("allgather_bucket_size", "segment"), HasSubstr("partition_activations")));
}

TEST(DeepSpeedConfig, AutoTakesOurs) {
  const Given given{.options = with("global-batch=32 micro-batch=8 lr=3e-4 max-grad-norm=2")};
  const DeepSpeedConfig config = parse(R"({
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "auto", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "auto", "params": {"warmup_num_steps": "auto", "warmup_type": "auto"}},
    "fp16": {"enabled": "auto", "loss_scale": 128}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto",
    "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto", "offload_param": null}})",
                                       given);
  EXPECT_THAT(config.settings, IsEmpty());
  EXPECT_THAT(config.warnings, IsEmpty());
}

TEST(DeepSpeedConfig, TwoSizesGiveTheThird) {
  const auto sizes = [](const std::string& text, const Given& given) {
    const TrainOptions options = options_of(text, given);
    return std::pair(options.global_batch, options.micro_batch);
  };
  const Given two_ranks{.options = with("global-batch=48"), .world_size = 2};
  EXPECT_EQ(sizes(R"({"train_batch_size": 64, "gradient_accumulation_steps": 4})", two_ranks),
            std::pair(64L, 8L));
  EXPECT_EQ(sizes(R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4})", two_ranks),
            std::pair(64L, 4L));
  EXPECT_EQ(sizes(R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3})", two_ranks),
            std::pair(24L, 4L));
  EXPECT_EQ(sizes(R"({"train_batch_size": 64})", two_ranks), std::pair(64L, 0L));
  EXPECT_EQ(sizes(R"({"train_micro_batch_size_per_gpu": 4})", two_ranks), std::pair(48L, 4L));
  EXPECT_EQ(sizes(R"({"gradient_accumulation_steps": 3})", two_ranks), std::pair(48L, 8L));
  const Given micro_given{.options = with("global-batch=48 micro-batch=8"), .names = {"micro-batch"}};
  EXPECT_EQ(sizes(R"({"gradient_accumulation_steps": 3})", micro_given), std::pair(24L, 8L));
}

TEST(DeepSpeedConfig, RefusesSizesThatContradict) {
  const Given two_ranks{.options = with("global-batch=48 micro-batch=8"), .world_size = 2};
  expect_refused(
      R"({"train_batch_size": 63, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4})",
      {"train_batch_size 63", "train_micro_batch_size_per_gpu 8", "gradient_accumulation_steps 4",
       "2 ranks = 64"},
      two_ranks);
  expect_refused(R"({"train_batch_size": 30, "gradient_accumulation_steps": 4})",
                 {"train_batch_size 30", "gradient_accumulation_steps 4"}, two_ranks);
  expect_refused(R"({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4})",
                 {"train_batch_size 30", "train_micro_batch_size_per_gpu 4"}, two_ranks);
  expect_refused(R"({"train_micro_batch_size_per_gpu": 7})", {"--global-batch 48"}, two_ranks);
  expect_refused(R"({"train_batch_size": 0})", {"train_batch_size expects a positive number"});
  const Given given{.options = with("global-batch=48"), .names = {"global-batch"}};
  expect_refused(R"({"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4})",
                 {"--global-batch 48", "train_micro_batch_size_per_gpu 8"}, given);
  expect_refused(R"({"train_batch_size": 64})",
                 {"train_batch_size makes --global-batch 64", "command line says 48"}, given);
}

TEST(DeepSpeedConfig, RefusesWhatContradictsTheCommandLine) {
  const Given given{.options = with("lr=2e-4 compute-dtype=bf16"), .names = {"lr", "compute-dtype"}};
  expect_refused(R"({"optimizer": {"params": {"lr": 1e-5}}})",
                 {"optimizer.params.lr makes --lr 1e-05", "command line says 0.0002"}, given);
  expect_refused(R"({"fp16": {"enabled": true}})", {"fp16.enabled makes --compute-dtype \"fp16\""}, given);
  EXPECT_EQ(options_of(R"({"optimizer": {"params": {"lr": 2e-4}}})", given).lr.peak, 2e-4);
}

TEST(DeepSpeedConfig, RefusesKeysThatContradictEachOther) {
  expect_refused(R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})",
                 {"fp16.enabled", "bf16.enabled"});
  expect_refused(R"({"optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
                     "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}}})",
                 {"optimizer.params.lr", "scheduler.params.warmup_max_lr"});
  expect_refused(R"({"bf16": {"enabled": true}, "bfloat16": {"enabled": true}})",
                 {"bf16.enabled is given twice"});
}

TEST(DeepSpeedConfig, ReadsTheCopiedNameAndDeprecatedOnesWithAWarning) {
  const DeepSpeedConfig config =
      parse(R"({"zero_optimization": {"stage": 3, "stage3_max_reuse_parameters": 1e9,
      "cpu_offload": true}, "bfloat16": {"enabled": true}})");
  EXPECT_THAT(config.warnings,
              Contains(HasSubstr(
                  "stage3_max_reuse_parameters is read as zero_optimization.stage3_max_reuse_distance")));
  EXPECT_THAT(config.warnings, Contains(HasSubstr("bfloat16 is read as bf16")));
  const TrainOptions options = apply(config, {});
  EXPECT_EQ(options.compute.dtype, at::kBFloat16);
  EXPECT_EQ(options.offload.optimizer, Placement::kHost);
}

TEST(DeepSpeedConfig, ReadsMastersInBf16) {
  const auto master_of = [](const char* value) {
    return options_of(std::string(R"({"bf16": {"enabled": true, "bf16_master_weights_and_grads": )") + value +
                      "}}")
        .compute.master_dtype;
  };
  EXPECT_EQ(master_of("true"), at::kBFloat16);
  EXPECT_EQ(master_of("false"), at::kFloat);
  expect_refused(R"({"fp16": {"enabled": true, "fp16_master_weights_and_grads": true}})",
                 {"fp16_master_weights_and_grads"});
}

TEST(DeepSpeedConfig, NamesTheNearestKnownKey) {
  expect_refused(R"({"gradient_cliping": 1})", {"'gradient_cliping': did you mean 'gradient_clipping'"});
  expect_refused(R"({"zero_optimization": {"stage3_prefetch_bucket_sice": 1}})",
                 {"did you mean 'zero_optimization.stage3_prefetch_bucket_size'"});
  expect_refused(R"({"overlap_comm": true})", {"did you mean 'zero_optimization.overlap_comm'"});
  expect_refused(R"({"zero_optimisation": {}})", {"did you mean 'zero_optimization'"});
}

TEST(DeepSpeedConfig, RefusesWhatKilnDoesNotHave) {
  expect_refused(R"({"optimizer": {"type": "Lamb", "params": {"max_coeff": 1}}})", {"Lamb", "AdamW"});
  expect_refused(R"({"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}})", {"adam_w_mode"});
  expect_refused(R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1}}})",
                 {"OneCycle", "WarmupLR"});
  expect_refused(R"({"amp": {"enabled": true}})", {"amp", "bf16"});
  expect_refused(R"({"zero_optimization": {"zero_quantized_weights": true}})", {"zero_quantized_weights"});
  expect_refused(R"({"gradient_clipping": "high"})", {"max-grad-norm expects a number", "gradient_clipping"});
  expect_refused(R"({"zero_optimization": 2})", {"zero_optimization expects an object"});
  expect_refused(R"({"fp16": {"enabled": 1}})", {"fp16.enabled expects true or false"});
  expect_refused("{", {"ds.json is not JSON"});
  expect_refused("[]", {"JSON object"});
}

TEST(DeepSpeedConfig, Schedules) {
  const TrainOptions options = options_of(R"({"scheduler": {"type": "WarmupDecayLR", "params": {
      "warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 100, "total_num_steps": 5000}}})");
  EXPECT_EQ(options.lr.shape, LrShape::kLinear);
  EXPECT_EQ(options.lr.peak, 1e-3);
  EXPECT_EQ(options.lr.warmup_steps, 100);
  EXPECT_EQ(options.lr.warmup, WarmupShape::kLog);  // DeepSpeed's default
  EXPECT_EQ(options.max_steps, 5000);
  EXPECT_EQ(options_of(R"({"scheduler": {"type": "WarmupCosineLR", "params": {
      "warmup_num_steps": 1, "warmup_type": "linear", "cos_min_ratio": 0.1}}})")
                .lr.warmup,
            WarmupShape::kLinear);
}

TEST(DeepSpeedConfig, OffloadsToADisk) {
  const TrainOptions options = options_of(R"({"aio": {"block_size": 1048576, "queue_depth": 8},
      "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 1e5,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"},
        "offload_param": {"device": "cpu", "nvme_path": "/elsewhere"}}})");
  EXPECT_EQ(options.offload.optimizer, Placement::kNvme);
  EXPECT_EQ(options.offload.params, Placement::kHost);
  EXPECT_EQ(options.offload.nvme.folder, "/disk");  // a path that no offload uses has no effect
  const TrainOptions weights = options_of(R"({"zero_optimization": {"stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/disk", "buffer_count": 5}}})");
  EXPECT_EQ(weights.offload.params, Placement::kNvme);
  EXPECT_EQ(weights.offload.nvme.folder, "/disk");
  EXPECT_EQ(options.offload.nvme.queue_depth, 8);
  EXPECT_EQ(options.zero.prefetch_segments, 0);
  EXPECT_EQ(options.zero.persist_threshold, 100000);
}

TEST(DeepSpeedConfig, ReadsWhatIsCopiedFromAWebPage) {
  const TrainOptions options = options_of(
      "\xEF\xBB\xBF{\n\xC2\xA0\xC2\xA0\"zero_optimization\":\xC2\xA0{\"stage\": 2},\n"
      "\xE2\x80\x8B  \xE2\x80\x9Csteps_per_print\xE2\x80\x9D: 50\n}\xE2\x80\xAF");
  EXPECT_EQ(options.zero.stage, 2);
  EXPECT_EQ(options.watch.log_every, 50);
  // In a string a no-break space is the string's.
  EXPECT_EQ(options_of("{\"zero_optimization\": {\"stage\": 3, \"offload_param\": {\"device\": \"nvme\", "
                       "\"nvme_path\": \"/a\xC2\xA0\\\"b\"}}}")
                .offload.nvme.folder,
            "/a\xC2\xA0\"b");
}

TEST(DeepSpeedConfig, ActivationCheckpointingRecomputes) {
  EXPECT_EQ(options_of(R"({"activation_checkpointing": {"number_checkpoints": null}})").memory.recompute,
            SegmentSet::all());
  EXPECT_TRUE(options_of(R"({"activation_checkpointing": {}})").memory.recompute.is_none());
  const TrainOptions on_host = options_of(R"({"activation_checkpointing": {"cpu_checkpointing": true}})");
  EXPECT_TRUE(on_host.memory.recompute.is_none());
  EXPECT_EQ(on_host.memory.offload_activations, SegmentSet::all());
}

TEST(DeepSpeedConfig, WarnsOnlyWhereTheValueDiffersFromWhatKilnDoes) {
  EXPECT_THAT(parse(R"({"prescale_gradients": false, "wall_clock_breakdown": false, "dump_state": false,
                        "memory_breakdown": false, "wandb": {"enabled": false}})")
                  .warnings,
              IsEmpty());
  EXPECT_THAT(parse(R"({"wall_clock_breakdown": true})").warnings, IsEmpty());
  EXPECT_THAT(
      parse(R"({"prescale_gradients": true, "wandb": {"enabled": true}})").warnings,
      ElementsAre(has_all("prescale_gradients true has no effect", "global batch"), HasSubstr("wandb")));
}

// Every key can be given: with a value of Kiln's own it is taken, warned about, or (what Kiln lacks) refused.
TEST(DeepSpeedConfig, EveryOptionOfTheTableExists) {
  const json options = to_json(TrainOptions());
  for (const DeepSpeedKey& key : deepspeed_keys()) {
    const bool names_option =
        key.effect == DeepSpeedKey::Effect::kOption || key.effect == DeepSpeedKey::Effect::kTogether;
    ASSERT_EQ(names_option, key.option != nullptr) << key.path;
    if (key.option) {
      EXPECT_TRUE(options.contains(key.option)) << key.path << " " << key.option;
    }
    if (!key.option) {
      EXPECT_STRNE(key.note, "") << key.path;
    }
  }
}

TEST(DeepSpeedConfig, TheDocumentationHasTheTable) {
  EXPECT_THAT(read_bytes(KILN_SOURCE_DIR "/docs/deepspeed_keys.md"), HasSubstr(deepspeed_keys_text()))
      << "docs/deepspeed_keys.md should end with:\n"
      << deepspeed_keys_text();
}

TEST(AccelerateConfig, ChangesAreNamedAsItsFileHasThem) {
  const TrainOptions options;
  const DeepSpeedConfig config = parse_accelerate_config(
      "distributed_type: DEEPSPEED\nmixed_precision: fp16\ndeepspeed_config:\n  zero_stage: 2\n"
      "  gradient_accumulation_steps: 2\n",
      "acc.yaml", {.ours = options});
  EXPECT_EQ(setting_text(config, "compute-dtype", "bf16"), "mixed_precision: bf16 in acc.yaml");
  EXPECT_EQ(setting_text(config, "zero-stage", "3"), "deepspeed_config.zero_stage: 3 in acc.yaml");
  EXPECT_EQ(setting_text(config, "micro-batch", "4"),
            "--micro-batch 4, without gradient_accumulation_steps in acc.yaml");
  EXPECT_EQ(setting_text(config, "recompute", "all"), "--recompute all");
}

// Every key that says the same is named, and what the batch needs when the number of passes goes.
TEST(DeepSpeedConfig, ChangesNameEveryKey) {
  const DeepSpeedConfig config = parse_deepspeed_config(
      R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
          "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}}})",
      "ds.json", {.ours = {}});
  EXPECT_EQ(setting_text(config, "lr", "0.001"),
            R"("optimizer.params.lr": 0.001 and "scheduler.params.warmup_max_lr": 0.001 in ds.json)");
  EXPECT_EQ(setting_text(config, "micro-batch", "2"),
            R"("train_micro_batch_size_per_gpu": 2 in ds.json, with "train_batch_size": 32 and without )"
            "gradient_accumulation_steps");
  EXPECT_EQ(setting_text(config, "micro-batch", "-1"),
            R"(--micro-batch -1, without train_micro_batch_size_per_gpu and with "train_batch_size": 32 and )"
            "without gradient_accumulation_steps in ds.json");
  EXPECT_EQ(setting_text(config, "gpus", "2"),
            R"(--gpus 2, with "train_batch_size": 32 and without gradient_accumulation_steps in ds.json)");
  EXPECT_EQ(setting_text(config, "recompute", "all"), "--recompute all");
}

}  // namespace
}  // namespace kiln
