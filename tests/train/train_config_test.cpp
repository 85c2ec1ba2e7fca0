#include "train/train_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "core/error.h"
#include "core/toml.h"
#include "models/registry.h"
#include "test_files.h"
#include "train/usable_options.h"

namespace kiln {
namespace {

using test::usable_options;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(TrainConfig, DefaultsAreDits) {
  const TrainOptions options = usable_options();
  EXPECT_NO_THROW(validate(options));
  EXPECT_EQ(options.lr, 1e-4);
  EXPECT_EQ(options.weight_decay, 0);
  EXPECT_EQ(options.global_batch, 256);
  EXPECT_THAT(options.ema_decay, ElementsAre(0.9999));
  EXPECT_EQ(options.class_dropout_prob, 0.1);
}

TEST(TrainConfig, TomlGivesTheSameOptionsBack) {
  TrainOptions options = usable_options();
  options.lr = 1.0 / 3;
  options.seed = 9223372036854775783u;
  options.ema_decay = {0.9999, 0.99};
  options.sample_classes = {1, 2};
  options.model_config = R"({"mlp_ratio": 3})";
  options.tf32 = true;
  TrainOptions read;
  for (const TomlEntry& entry : parse_toml(to_toml(options), "config.toml"))
    set_option(read, entry.key, entry.value);
  EXPECT_EQ(to_json(read), to_json(options));
}

TEST(TrainConfig, RecipeErrorsNameTheOption) {
  TrainOptions options;
  const auto setting = [&](const char* name, nlohmann::json value) {
    return [&options, name, value] { set_option(options, name, value); };
  };
  EXPECT_THAT(setting("globalbatch", 1), ThrowsMessage<Error>(HasSubstr("'global-batch'")));
  EXPECT_THAT(setting("lr", "high"), ThrowsMessage<Error>(HasSubstr("lr expects a number")));
  EXPECT_THAT(setting("max-steps", 1.5), ThrowsMessage<Error>(HasSubstr("an integer")));
  EXPECT_THAT(setting("seed", -1), ThrowsMessage<Error>(HasSubstr("seed")));
  EXPECT_THAT(setting("tf32", 1), ThrowsMessage<Error>(HasSubstr("true or false")));
  EXPECT_THAT(setting("ema-decay", {"a"}), ThrowsMessage<Error>(HasSubstr("list")));
  set_option(options, "ema-decay", "none");
  EXPECT_TRUE(options.ema_decay.empty());
  set_option(options, "ema-decay", 0.5);  // one number is a list of one
  EXPECT_THAT(options.ema_decay, ElementsAre(0.5));
}

TEST(TrainConfig, ChangesAreSortedByWhatTheyDoToARun) {
  TrainOptions saved = usable_options(), now = usable_options();
  EXPECT_TRUE(compare_options(to_json(saved), to_json(now)).refused.empty());
  now.lr = 2e-4;
  now.micro_batch = 8;
  now.max_steps = 7;
  const OptionChanges changes = compare_options(to_json(saved), to_json(now));
  EXPECT_THAT(changes.refused, ElementsAre("--lr (0.0001 -> 0.0002)"));
  EXPECT_THAT(changes.warned, ElementsAre("--micro-batch (0 -> 8)"));
}

TEST(TrainConfig, JsonIsComparedAsWhatItSays) {
  TrainOptions saved = usable_options(), now = usable_options();
  saved.model_config = R"({"depth": 3, "num_heads": 2})";
  now.model_config = R"({"num_heads":2,"depth":3})";
  EXPECT_TRUE(compare_options(to_json(saved), to_json(now)).refused.empty());
  now.model_config = R"({"num_heads":2,"depth":4})";
  EXPECT_EQ(compare_options(to_json(saved), to_json(now)).refused.size(), 1u);
  now.model_config = "";
  EXPECT_EQ(compare_options(to_json(saved), to_json(now)).refused.size(), 1u);
}

TEST(TrainConfig, ImpossibleValuesAreRefusedByName) {
  const auto refusal = [](const char* name, const nlohmann::json& value) {
    TrainOptions options = usable_options();
    set_option(options, name, value);
    return test::message_of([&] { validate(options); });
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

TEST(TrainConfig, SettingsWithoutEffectAreRefused) {
  TrainOptions options = usable_options();
  options.flow_shift = 3;
  EXPECT_THAT([&] { validate(options); }, ThrowsMessage<Error>(HasSubstr("--flow-shift has no effect")));
  options.objective = "flow";
  EXPECT_EQ(objective_config_of(options).at("shift"), 3);
  options.snr_gamma = 5;
  EXPECT_THAT([&] { validate(options); }, ThrowsMessage<Error>(HasSubstr("--snr-gamma has no effect")));
}

TEST(TrainConfig, EveryRecipeIsValid) {
  int64_t num_recipes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(KILN_SOURCE_DIR "/recipes")) {
    if (entry.path().extension() != ".toml") continue;
    ++num_recipes;
    TrainOptions options = usable_options();
    for (const TomlEntry& line : read_toml(entry.path())) set_option(options, line.key, line.value);
    EXPECT_NO_THROW(validate(options)) << entry.path();
    EXPECT_NO_THROW(resolve_denoiser_config(options.model, {{"input_size", 32}})) << entry.path();
  }
  EXPECT_GE(num_recipes, 8);
}

}  // namespace
}  // namespace kiln
