#include "run/option_values.h"

#include <cmath>

#include "core/tensors.h"
#include "core/toml.h"
#include "test_files.h"
#include "train/setup.h"
#include "train/usable_options.h"

namespace kiln {
namespace {

using test::usable_options;

TEST(TrainOptions, DefaultsAreDits) {
  const TrainOptions options = usable_options();
  EXPECT_NO_THROW(validate(options));
  EXPECT_EQ(options.lr.peak, 1e-4);
  EXPECT_EQ(options.optimizer.weight_decay, 0);
  EXPECT_EQ(options.global_batch, 256);
  EXPECT_THAT(options.ema.decays, ElementsAre(0.9999));
  EXPECT_EQ(options.model.class_dropout_prob, 0.1);
}

TEST(TrainOptions, TomlGivesTheSameOptionsBack) {
  TrainOptions options = usable_options();
  options.lr.peak = 1.0 / 3;
  options.seed = 9223372036854775783u;
  options.ema.decays = {0.9999, 0.99};
  options.samples.classes = {1, 2};
  options.model.config = R"({"mlp_ratio": 3})";
  options.compute.tf32 = true;
  TrainOptions read;
  for (const TomlEntry& entry : parse_toml(to_toml(options), "config.toml"))
    set_option(read, entry.key, entry.value);
  EXPECT_EQ(to_json(read), to_json(options));
}

TEST(TrainOptions, RecipeErrorsNameTheOption) {
  TrainOptions options;
  EXPECT_ERROR(set_option(options, "globalbatch", 1), "'global-batch'");
  EXPECT_ERROR(set_option(options, "lr", "high"), "lr expects a number");
  EXPECT_ERROR(set_option(options, "max-steps", 1.5), "an integer");
  EXPECT_ERROR(set_option(options, "max-steps", UINT64_MAX), "max-steps expects an integer");
  EXPECT_ERROR(set_option(options, "seed", -1), "seed");
  EXPECT_ERROR(set_option(options, "tf32", 1), "true or false");
  EXPECT_ERROR(set_option(options, "ema-decay", {"a"}), "list");
  set_option(options, "ema-decay", "none");
  EXPECT_TRUE(options.ema.decays.empty());
  set_option(options, "ema-decay", 0.5);  // one number is a list of one
  EXPECT_THAT(options.ema.decays, ElementsAre(0.5));
}

TEST(TrainOptions, ChangesAreSortedByWhatTheyDoToARun) {
  TrainOptions saved = usable_options(), now = usable_options();
  EXPECT_TRUE(compare_options(to_json(saved), to_json(now)).refused.empty());
  now.lr.peak = 2e-4;
  now.micro_batch = 8;
  now.max_steps = 7;
  const OptionChanges changes = compare_options(to_json(saved), to_json(now));
  EXPECT_THAT(changes.refused, ElementsAre("--lr (0.0001 -> 0.0002)"));
  EXPECT_THAT(changes.warned, ElementsAre("--micro-batch (0 -> 8)"));
}

// A program that did not have the option trained with what is its default today.
TEST(TrainOptions, AnOptionThatASavedRunLacksHadItsDefault) {
  nlohmann::json saved = to_json(usable_options());
  saved.erase("snr-gamma");
  saved.erase("tf32");
  TrainOptions now = usable_options();
  EXPECT_TRUE(compare_options(saved, to_json(now)).refused.empty());
  now.objective.snr_gamma = 5;
  now.compute.tf32 = true;
  const OptionChanges changes = compare_options(saved, to_json(now));
  EXPECT_THAT(changes.refused, ElementsAre("--snr-gamma (0.0 -> 5.0)"));
  EXPECT_THAT(changes.warned, ElementsAre("--tf32 (false -> true)"));
}

TEST(TrainOptions, FasterWaysOfAGpuAreTakenByName) {
  TrainOptions options = usable_options();
  EXPECT_TRUE(options.compute.untried_gpu.is_none());
  for (const auto& [value, text] : {std::pair<nlohmann::json, const char*>{"all", "all"},
                                    {"keep-gelu, update", "update,keep-gelu"},
                                    {"none", "none"},
                                    {true, "all"},  // a flag, in a run of an older program
                                    {false, "none"}}) {
    set_option(options, "untried-gpu", value);
    EXPECT_EQ(to_json(options).at("untried-gpu"), text);
    nlohmann::json saved = to_json(options);
    saved["untried-gpu"] = value.is_boolean() ? value : saved["untried-gpu"];
    EXPECT_TRUE(compare_options(saved, to_json(options)).warned.empty());
  }
  set_option(options, "untried-gpu", "update");
  EXPECT_TRUE(options.compute.updates_beside());
  EXPECT_FALSE(options.compute.untried_gpu.has(Untried::kProducts));
  EXPECT_ERROR(set_option(options, "untried-gpu", "speed"), "--untried-gpu expects one of update, products");
  EXPECT_ERROR(set_option(options, "untried-gpu", 1), "untried-gpu expects a string");
}

// Every option with named values takes each of them and refuses any other by name.
TEST(TrainOptions, ChoicesAreTakenByName) {
  TrainOptions options = usable_options();
  EXPECT_ERROR(set_option(options, "compute-dtype", "float8"),
               "--compute-dtype expects one of f32, bf16, fp16, fp8, got 'float8'");
  EXPECT_ERROR(set_option(options, "offload-params", "moon"),
               "--offload-params expects one of none, cpu, nvme");
  EXPECT_ERROR(set_option(options, "lr-warmup", "cosine"), "--lr-warmup expects one of linear, log");
  EXPECT_ERROR(set_option(options, "lr-schedule", 1), "lr-schedule expects a string");
  for (const std::string& dtype : choice_names<at::ScalarType>()) {
    set_option(options, "compute-dtype", dtype);
    set_option(options, "reduce-dtype", dtype);
    EXPECT_EQ(to_json(options).at("compute-dtype"), dtype);
    EXPECT_EQ(to_json(options).at("reduce-dtype"), dtype);
  }
  set_option(options, "reduce-dtype", "");
  EXPECT_FALSE(options.zero.reduce_dtype);
}

TEST(TrainOptions, JsonIsComparedAsWhatItSays) {
  TrainOptions saved = usable_options(), now = usable_options();
  saved.model.config = R"({"depth": 3, "num_heads": 2})";
  now.model.config = R"({"num_heads":2,"depth":3})";
  EXPECT_TRUE(compare_options(to_json(saved), to_json(now)).refused.empty());
  now.model.config = R"({"num_heads":2,"depth":4})";
  EXPECT_EQ(compare_options(to_json(saved), to_json(now)).refused.size(), 1u);
  now.model.config = "";
  EXPECT_EQ(compare_options(to_json(saved), to_json(now)).refused.size(), 1u);
}

TEST(TrainOptions, ImpossibleValuesAreRefusedByName) {
  const auto refusal = [](const char* name, const nlohmann::json& value) {
    TrainOptions options = usable_options();
    set_option(options, name, value);
    return message_of([&] { validate(options); });
  };
  for (const char* name : {"hidden-size", "depth", "num-heads", "patch-size", "num-classes", "max-grad-norm",
                           "checkpoint-every", "peak-tflops", "nproc"})
    EXPECT_THAT(refusal(name, -1), HasSubstr(fmt::format("--{} expects 0 or more, got -1", name)));
  for (const char* name : {"image-size", "global-batch", "max-steps", "log-every", "num-samples"})
    EXPECT_THAT(refusal(name, 0), HasSubstr(fmt::format("--{} expects a positive number, got 0", name)));
  EXPECT_THAT(refusal("cfg-scale", NAN), HasSubstr("--cfg-scale expects a number, got nan"));
  // config.toml could not hold it.
  EXPECT_THAT(refusal("out", "run\xff"), HasSubstr(R"(--out expects UTF-8, got "run\xff")"));
}

TEST(TrainOptions, SettingsWithoutEffectAreRefused) {
  TrainOptions options = usable_options();
  options.objective.flow_shift = 3;
  EXPECT_ERROR(validate(options), "--flow-shift has no effect");
  options.objective.name = "flow";
  EXPECT_EQ(objective_config_of(options.objective).at("shift"), 3);
  options.objective.snr_gamma = 5;
  EXPECT_ERROR(validate(options), "--snr-gamma has no effect");
}

TEST(TrainOptions, ContrastiveFlowMatchingNeedsAFlowAndTwoSamples) {
  TrainOptions options = usable_options();
  options.objective.contrastive_weight = 0.05;
  EXPECT_ERROR(validate(options), "--contrastive-weight has no effect");
  options.objective.name = "flow";
  EXPECT_NO_THROW(validate(options));
  EXPECT_EQ(objective_config_of(options.objective).at("contrastive_lambda"), 0.05);
  options.global_batch = 1;
  EXPECT_ERROR(validate(options), "give --global-batch 2 or more");
  options.objective.contrastive_weight = 1;
  EXPECT_ERROR(validate(options), "--contrastive-weight expects 0 or more, below 1, got 1");
}

TEST(TrainOptions, EveryRecipeIsValid) {
  int64_t num_recipes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(KILN_SOURCE_DIR "/recipes")) {
    if (entry.path().extension() != ".toml" || entry.path().filename() == "variants.toml") continue;
    ++num_recipes;
    TrainOptions options = usable_options();
    for (const TomlEntry& line : read_toml(entry.path())) set_option(options, line.key, line.value);
    EXPECT_NO_THROW(validate(options)) << entry.path();
    EXPECT_NO_THROW(synthetic_shape(options)) << entry.path();  // fits the model to it
  }
  EXPECT_GE(num_recipes, 8);
}

}  // namespace
}  // namespace kiln
