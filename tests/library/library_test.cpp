// The interface of include/kiln, as a program that links it calls it.
#include <gtest/gtest.h>

#include "core/aten.h"
#include "data/store/feature_store.h"
#include "kiln/model.h"
#include "kiln/plan.h"
#include "kiln/step.h"
#include "kiln/store.h"
#include "library/guarded.h"
#include "plan/run/make_plan.h"
#include "test_files.h"

namespace kiln {
namespace {

using test::TempFolder;
using ::testing::HasSubstr;

const v0::Options kTiny = {{"model", "dit"},  {"hidden-size", 48}, {"depth", 2},       {"num-heads", 3},
                           {"patch-size", 2}, {"image-size", 64},  {"num-classes", 4}, {"global-batch", 4},
                           {"device", "cpu"}, {"threads", 1},      {"max-steps", 3},   {"lr", 1e-3}};

template <class Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const v0::Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no v0::Error was thrown";
  return "";
}

v0::Options with(v0::Options options, const std::string& name, const v0::Value& value) {
  options[name] = value;
  return options;
}

// Latents that rise from sample to sample.
v0::Batch batch_of(const v0::Trainer::Shape& shape) {
  v0::Batch batch;
  for (int64_t row = 0; row < shape.rows; ++row) {
    batch.class_labels.push_back(row % shape.num_classes);
    for (int64_t i = 0; i < shape.channels * shape.height * shape.width; ++i)
      batch.x_0.push_back(0.1F * static_cast<float>(row) - 0.01F * static_cast<float>(i % 7));
  }
  return batch;
}

struct Repeated : v0::BatchSource {
  explicit Repeated(v0::Batch of) : batch(std::move(of)) {}
  v0::Batch next() override { return batch; }
  v0::Batch batch;
};

std::vector<double> losses_of(const v0::Options& options, int64_t steps) {
  v0::Trainer trainer(options);
  Repeated source(batch_of(trainer.shape()));
  std::vector<double> losses;
  trainer.train(source, steps, [&](const v0::StepResult& done) {
    EXPECT_TRUE(done.applied);
    EXPECT_EQ(done.step, std::ssize(losses) + 1);
    EXPECT_EQ(done.lr, 1e-3);
    losses.push_back(done.loss);
  });
  return losses;
}

TEST(Library, TrainsOnBatchesOfTheCallersOwn) {
  const std::vector<double> losses = losses_of(kTiny, 3);
  EXPECT_EQ(losses.size(), 3U);
  EXPECT_EQ(losses, losses_of(kTiny, 3));  // to the bit
  EXPECT_NE(losses, losses_of(with(kTiny, "seed", 7), 3));
}

TEST(Library, TakesGivenNoiseAndTimes) {
  v0::Trainer trainer(kTiny);
  const v0::Trainer::Shape shape = trainer.shape();
  EXPECT_EQ(shape.channels * shape.height * shape.width, 4 * 8 * 8);
  v0::Batch batch = batch_of(shape);
  batch.noise.assign(batch.x_0.size(), 0.5F);
  batch.times.assign(4, 0.25);
  const double first = trainer.step(batch).loss;
  v0::Trainer other(kTiny);
  EXPECT_EQ(other.step(batch).loss, first);
  batch.times.assign(4, 0.75);
  v0::Trainer later(kTiny);
  EXPECT_NE(later.step(batch).loss, first);
}

TEST(Library, SaysWhatABatchLacks) {
  v0::Trainer trainer(kTiny);
  v0::Batch batch = batch_of(trainer.shape());
  batch.x_0.pop_back();
  EXPECT_EQ(error_of([&] { trainer.step(batch); }), "a batch needs 1024 values of x_0, got 1023");
  batch = batch_of(trainer.shape());
  batch.class_labels.clear();
  EXPECT_EQ(error_of([&] { trainer.step(batch); }), "a batch needs 4 values of class_labels, got 0");
  batch = batch_of(trainer.shape());
  batch.noise = {1};
  EXPECT_EQ(error_of([&] { trainer.step(batch); }), "a batch needs 1024 values of noise, got 1");
  batch = batch_of(trainer.shape());
  batch.times = {0, 0.5, 1, 0.5};
  EXPECT_EQ(error_of([&] { trainer.step(batch); }), "a batch needs times from 0 to below 1, got 1");
  for (const int64_t label : {-1, 5}) {  // 4 stands for none
    batch = batch_of(trainer.shape());
    batch.class_labels.back() = label;
    EXPECT_EQ(error_of([&] { trainer.step(batch); }),
              fmt::format("a batch needs class_labels from 0 to 4, got {}", label));
  }
}

// What the model sees would be noised otherwise than what it is compared with.
TEST(Library, RefusesNoiseThatIsPerturbed) {
  v0::Trainer trainer(with(kTiny, "input-perturbation", 0.1));
  v0::Batch batch = batch_of(trainer.shape());
  EXPECT_TRUE(trainer.step(batch).applied);
  batch.noise.assign(batch.x_0.size(), 0.5F);
  EXPECT_THAT(error_of([&] { trainer.step(batch); }), HasSubstr("leave noise out"));
}

TEST(Library, RefusesOptionsAsTheProgramDoes) {
  EXPECT_THAT(error_of([] { v0::Trainer(with(kTiny, "global-bach", 4)); }), HasSubstr("global-batch"));
  EXPECT_THAT(error_of([] { v0::Trainer(with(kTiny, "lr", "fast")); }), HasSubstr("lr"));
  EXPECT_THAT(error_of([] { v0::Trainer(with(kTiny, "global-batch", -1)); }), HasSubstr("--global-batch"));
  EXPECT_THAT(error_of([] { v0::Trainer(with(kTiny, "lora-rank", 4)); }), HasSubstr("an adapter"));
  EXPECT_THAT(error_of([] { v0::Trainer(with(kTiny, "memory-budget", "1G")); }), HasSubstr("recompute"));
  EXPECT_THAT(error_of([] { v0::plan({.options = kTiny, .gpu = "H1000"}); }), HasSubstr("H1000"));
}

TEST(Library, SavedWeightsAreLoadedAgain) {
  const TempFolder folder;
  v0::Trainer trainer(kTiny);
  trainer.step(batch_of(trainer.shape()));
  trainer.save_weights(folder / "w.safetensors", /*average=*/false);
  const v0::Model model = v0::Model::load(folder / "w.safetensors");
  const at::NoGradGuard no_grad;
  const at::Tensor x_t = at::ones({2, 4, 8, 8}), labels = at::tensor({0, 3}, at::kLong);
  const at::Tensor prediction = model.predict(x_t, at::full({2}, 10.0), labels);
  EXPECT_EQ(prediction.sizes()[0], 2);
  EXPECT_EQ(prediction.sizes()[2], 8);
  EXPECT_GT(model.weights().size(), 10U);
  EXPECT_THAT(error_of([&] { model.predict(x_t, at::full({2}, 10.0), at::Tensor()); }), HasSubstr("label"));
  EXPECT_THAT(error_of([&] { v0::Model::load(folder / "absent"); }), HasSubstr("absent"));
}

TEST(Library, FreshWeightsFollowFromTheSeed) {
  const char* config =
      R"({"hidden_size": 48, "depth": 1, "num_heads": 3, "input_size": 8, "num_classes": 4})";
  const auto weights = [&](uint64_t seed) { return v0::Model::fresh("dit", config, seed).weights(); };
  const auto first = weights(1), same = weights(1), other = weights(2);
  const std::string key = "blocks.0.attn.qkv.weight";
  EXPECT_TRUE(at::equal(first.at(key), same.at(key)));
  EXPECT_FALSE(at::equal(first.at(key), other.at(key)));
}

TEST(Library, PlansAsTheProgramDoes) {
  const v0::Plan planned = v0::plan({.options = {{"model", "DiT-S/8"}, {"global-batch", 32}}, .gpu = "H100"});
  const TrainOptions options = train_options_of({{"model", "DiT-S/8"}, {"global-batch", 32}});
  const Plan made = make_plan({.train = options, .gpu = "H100"});
  EXPECT_EQ(planned.needed_bytes, made.needed_bytes);
  EXPECT_EQ(planned.peak_bytes, made.peak_bytes);
  EXPECT_EQ(planned.bytes_by_kind, made.by_kind);
  EXPECT_TRUE(planned.fits);
  EXPECT_THAT(planned.json, HasSubstr("\"peak_bytes\""));
}

TEST(Library, ReadsAStore) {
  const TempFolder folder;
  StoreInfo info;
  info.autoencoder = "autoencoder_kl";
  info.scaling_factor = 0.5;
  info.channels = 2;
  info.lanes = {{.height = 2, .width = 3}};
  info.image_size = 16;
  info.has_logvar = false;
  info.class_names = {"cat", "dog"};
  info.source = "a test";
  {
    const auto writer = FeatureStoreWriter::open(folder / "store", info);
    for (int64_t i = 0; i < 3; ++i)
      writer->add({.name = "picture " + std::to_string(i),
                   .caption = i == 1 ? "a dog" : "",
                   .label = i % 2,
                   .mean = std::vector<float>(12, static_cast<float>(i)),
                   .logvar = {}});
    writer->finish();
  }
  const v0::Store store = v0::Store::open(folder / "store");
  EXPECT_EQ(store.size(), 3);
  EXPECT_EQ(store.shape(2).channels, 2);
  EXPECT_EQ(store.shape(2).height, 2);
  EXPECT_EQ(store.shape(2).width, 3);
  EXPECT_EQ(store.mean(2), std::vector<float>(12, 2));
  EXPECT_TRUE(store.logvar(2).empty());
  EXPECT_EQ(store.label(1), 1);
  EXPECT_EQ(store.name(1), "picture 1");
  EXPECT_EQ(store.caption(1), "a dog");
  EXPECT_EQ(store.scaling_factor(), 0.5);
  EXPECT_THAT(store.class_names(), ::testing::ElementsAre("cat", "dog"));
  EXPECT_EQ(error_of([&] { store.label(3); }), "the store has 3 samples, there is no number 3");
  EXPECT_THAT(error_of([&] { v0::Store::open(folder / "absent"); }), HasSubstr("absent"));
}

}  // namespace
}  // namespace kiln
