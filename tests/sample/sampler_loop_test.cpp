// From noise to pictures: independence of the batch, guidance, rounding.
#include "sample/sampler_loop.h"

#include "diffusion/objective.h"
#include "sample/tiny_denoiser.h"
#include "test_files.h"

namespace kiln {
namespace {

SampleOptions tiny_options(int64_t num_images, int64_t batch, const std::string& sampler = "ddpm") {
  SampleOptions options;
  const std::string objective = sampler == "flow_euler" ? "flow" : "iddpm";
  options.sampler = sampler_config(sampler, 6, objective_config(objective));
  std::vector<int64_t> labels;
  for (int64_t i = 0; i < num_images; ++i) {
    options.images.push_back(i);
    labels.push_back(i % 3);
  }
  options.conditioning = class_labels_fn({.num_classes = 10}, labels);
  options.cfg_scale = 2;
  options.batch = batch;
  options.seed = 7;
  return options;
}

std::vector<Image> draw(const Denoiser& denoiser, const SampleOptions& options) {
  std::vector<Image> images;
  EXPECT_TRUE(sample_images(denoiser, nullptr, options, [&](int64_t index, const Image& image) {
    EXPECT_EQ(index, options.images[images.size()]);
    images.push_back(image);
  }));
  return images;
}

int largest_difference(const Image& a, const Image& b) {
  int largest = 0;
  for (size_t i = 0; i < a.rgb.size(); ++i)
    largest = std::max(largest, std::abs(int(a.rgb[i]) - int(b.rgb[i])));
  return largest;
}

class EverySampler : public ::testing::TestWithParam<std::string> {
 protected:
  const std::unique_ptr<Denoiser> denoiser_ = tiny_denoiser({.learn_sigma = GetParam() != "flow_euler"});
  std::vector<Image> draw_of(int64_t num_images, int64_t batch) const {
    return draw(*denoiser_, tiny_options(num_images, batch, GetParam()));
  }
};
INSTANTIATE_TEST_SUITE_P(Names, EverySampler, ::testing::ValuesIn(sampler_names()));

TEST_P(EverySampler, ImagesDoNotDependOnTheBatch) {
  const std::vector<Image> one = draw_of(7, 1);
  ASSERT_EQ(one.size(), 7u);
  for (int64_t batch : {2, 3, 7, 100}) {
    const std::vector<Image> many = draw_of(7, batch);
    ASSERT_EQ(many.size(), 7u);
    for (size_t i = 0; i < 7; ++i) EXPECT_LE(largest_difference(one[i], many[i]), 1) << "batch " << batch;
  }
  // The images themselves differ: the comparison above is of something.
  EXPECT_GT(largest_difference(one[0], one[3]), 20);
}

TEST_P(EverySampler, ImagesAreNamedByTheirIndex) {
  const std::vector<Image> all = draw_of(6, 6);
  SampleOptions some = tiny_options(6, 6, GetParam());
  some.images = {some.images[4], some.images[1]};
  some.conditioning = class_labels_fn({.num_classes = 10}, {4 % 3, 1});
  const std::vector<Image> two = draw(*denoiser_, some);
  EXPECT_LE(largest_difference(two[0], all[4]), 1);
  EXPECT_LE(largest_difference(two[1], all[1]), 1);
}

// Shows the first three channels of what it is given, and remembers it.
class RecordingAutoencoder : public Autoencoder {
 public:
  at::Tensor encode(const at::Tensor& images) const override { return images; }
  at::Tensor decode(const at::Tensor& raw_latents) const override {
    latents.push_back(raw_latents);
    return raw_latents.narrow(1, 0, 3);
  }
  const ParameterList& parameters() const override { return none_; }
  mutable std::vector<at::Tensor> latents;

 private:
  ParameterList none_;
};

TEST(SampleImages, TheDecoderIsGivenUnscaledLatents) {
  const auto denoiser = tiny_denoiser({.in_channels = 4});
  RecordingAutoencoder plain, scaled;
  plain.name = scaled.name = "autoencoder_kl";
  scaled.scaling_factor = 0.25;
  scaled.shift_factor = 0.5;
  const auto sink = [](int64_t, const Image&) {};
  sample_images(*denoiser, &plain, tiny_options(3, 2), sink);
  sample_images(*denoiser, &scaled, tiny_options(3, 2), sink);
  ASSERT_EQ(plain.latents.size(), 2u);
  EXPECT_EQ(plain.latents[1].sizes(), at::IntArrayRef({1, 4, 8, 8}));
  // latents = (raw - shift) * scaling
  for (size_t i = 0; i < 2; ++i)
    EXPECT_TRUE(at::allclose((scaled.latents[i] - 0.5) * 0.25, plain.latents[i], 1e-4, 1e-5));
}

TEST(SampleImages, SameSeedGivesTheSameBytes) {
  const auto denoiser = tiny_denoiser({});
  const std::vector<Image> first = draw(*denoiser, tiny_options(3, 3)),
                           again = draw(*denoiser, tiny_options(3, 3));
  SampleOptions other_seed = tiny_options(3, 3);
  other_seed.seed = 8;
  const std::vector<Image> other = draw(*denoiser, other_seed);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(first[i].rgb, again[i].rgb);
    EXPECT_NE(first[i].rgb, other[i].rgb);
  }
}

TEST(SampleImages, StopsWhenAsked) {
  const auto denoiser = tiny_denoiser({});
  SampleOptions options = tiny_options(4, 2);
  int steps = 0, images = 0;
  options.stop = [&] { return ++steps > 8; };  // in the second batch
  EXPECT_FALSE(sample_images(*denoiser, nullptr, options, [&](int64_t, const Image&) { ++images; }));
  EXPECT_EQ(images, 2);
}

TEST(SampleImages, LeavesGradientsOnForItsCaller) {
  const auto denoiser = tiny_denoiser({});
  draw(*denoiser, tiny_options(1, 1));
  EXPECT_TRUE(at::GradMode::is_enabled());
}

TEST(SampleImages, RefusesWhatCannotBe) {
  const auto sink = [](int64_t, const Image&) {};
  const auto no_null = tiny_denoiser({.class_dropout_prob = 0});
  EXPECT_ERROR(sample_images(*no_null, nullptr, tiny_options(1, 1), sink), "class or caption dropout");
  const auto latent = tiny_denoiser({.in_channels = 4});
  EXPECT_ERROR(sample_images(*latent, nullptr, tiny_options(1, 1), sink), "autoencoder");
  const auto denoiser = tiny_denoiser({});
  EXPECT_ERROR(class_labels_fn(denoiser->shape().conditioning, {11}), "0..9");
  SampleOptions options = tiny_options(1, 0);
  EXPECT_ERROR(sample_images(*denoiser, nullptr, options, sink), "batch");
}

// The two conventions of guidance, against two separate forward passes.
class Guidance : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(3); }
  at::Tensor forward(const Denoiser& denoiser, const at::Tensor& x, double t, const at::Tensor& labels) {
    return denoiser.forward(
        {.x_t = x, .timesteps = at::full({x.size(0)}, t), .conditioning = {.class_labels = labels}});
  }
  DenoiseFn guided_by(const Denoiser& denoiser, double cfg_scale, CfgConvention convention) {
    return guided_denoiser(denoiser, {.class_labels = labels_}, {.class_labels = null_}, cfg_scale,
                           convention);
  }
  const at::NoGradGuard no_grad_;
  const at::Tensor labels_ = at::tensor({1, 5}, at::kLong), null_ = at::tensor({10, 10}, at::kLong);
};

TEST_F(Guidance, TouchesTheChannelsOfItsConvention) {
  const auto denoiser = tiny_denoiser({.in_channels = 4});
  const at::Tensor x = at::randn({2, 4, 8, 8});
  const at::Tensor cond = forward(*denoiser, x, 300, labels_), uncond = forward(*denoiser, x, 300, null_);
  const at::Tensor guided = uncond + 3.0 * (cond - uncond);
  const auto expect = [&](CfgConvention convention, int64_t channels) {
    const at::Tensor output = guided_by(*denoiser, 3, convention)(x, 300);
    ASSERT_EQ(output.sizes(), cond.sizes());
    EXPECT_TRUE(at::allclose(output.narrow(1, 0, channels), guided.narrow(1, 0, channels), 1e-4, 1e-5));
    EXPECT_TRUE(at::allclose(output.narrow(1, channels, 8 - channels), cond.narrow(1, channels, 8 - channels),
                             1e-4, 1e-5));
  };
  expect(CfgConvention::kModel, 3);
  expect(CfgConvention::kAll, 4);
  expect(CfgConvention::kAuto, 3);  // it predicts a sigma
}

TEST_F(Guidance, AutoGuidesAllChannelsOfModelsWithoutSigma) {
  const auto denoiser = tiny_denoiser({.in_channels = 4, .learn_sigma = false});
  const at::Tensor x = at::randn({2, 4, 8, 8});
  EXPECT_TRUE(at::equal(guided_by(*denoiser, 3, CfgConvention::kAuto)(x, 300),
                        guided_by(*denoiser, 3, CfgConvention::kAll)(x, 300)));
}

TEST_F(Guidance, ScaleOneIsTheConditionalModel) {
  const auto denoiser = tiny_denoiser({});
  const at::Tensor x = at::randn({2, 3, 8, 8});
  EXPECT_TRUE(
      at::equal(guided_by(*denoiser, 1, CfgConvention::kAuto)(x, 12), forward(*denoiser, x, 12, labels_)));
}

TEST(Noise, IsOfTheImageAndTheStep) {
  const std::vector<int64_t> images = {3, 4};
  const at::Tensor start = start_noise(5, images, {4, 8, 8});
  EXPECT_TRUE(at::equal(start[1], start_noise(5, {4}, {4, 8, 8})[0]));
  EXPECT_FALSE(at::equal(start[0], start[1]));
  EXPECT_FALSE(at::equal(start, start_noise(6, images, {4, 8, 8})));
  const at::Tensor step_0 = step_noise(5, images, {4, 8, 8}, 0), step_1 = step_noise(5, images, {4, 8, 8}, 1);
  EXPECT_FALSE(at::equal(step_0, step_1));
  EXPECT_FALSE(at::equal(step_0, start));
  EXPECT_NEAR(start_noise(5, std::vector<int64_t>{9}, {4, 64, 64}).std().item<double>(), 1, 0.02);
}

TEST(ToImages, RoundsAsTheReferenceDoes) {
  const at::Tensor levels = at::tensor({-2.0f, -1.0f, -0.9999f, 0.0f, 0.0039f, 0.99f, 1.0f, 3.0f});
  const at::Tensor pixels = levels.view({1, 1, 2, 4}).expand({1, 3, 2, 4});
  const std::vector<Image> images = to_images(pixels);
  ASSERT_EQ(images.size(), 1u);
  EXPECT_EQ(images[0].height, 2);
  EXPECT_EQ(images[0].width, 4);
  // clamp(127.5 x + 128, 0, 255), truncated: -1 is 0.5, 0 is 128, 0.0039 is 128.497, 1 is 255.5.
  const std::vector<int> expected = {0, 0, 0, 128, 128, 254, 255, 255};
  for (size_t i = 0; i < expected.size(); ++i)
    for (size_t c = 0; c < 3; ++c) EXPECT_EQ(images[0].rgb[3 * i + c], expected[i]) << i;
}

TEST(ToImages, KeepsChannelsAndRowsInPlace) {
  at::Tensor pixels = at::full({2, 3, 2, 3}, -1.0f);
  pixels[1][2][1][0] = 1.0f;  // second image, blue, second row, first column
  const std::vector<Image> images = to_images(pixels);
  for (size_t i = 0; i < images[1].rgb.size(); ++i)
    EXPECT_EQ(images[1].rgb[i], i == 3 * 3 + 2 ? 255 : 0) << i;
  for (uint8_t value : images[0].rgb) EXPECT_EQ(value, 0);
}

}  // namespace
}  // namespace kiln
