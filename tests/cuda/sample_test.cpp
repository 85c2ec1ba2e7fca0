// Sampling, encoding and decoding on a GPU against the CPU.
#include <cmath>

#include "cuda/gpu_test.h"
#include "diffusion/objective.h"
#include "models/autoencoders/autoencoder_kl.h"
#include "models/weights.h"
#include "sample/sampler_loop.h"
#include "sample/tiny_denoiser.h"

namespace kiln {
namespace {

using test::kGpu;
using CudaSample = test::GpuTest;

void move_to_gpu(const ParameterList& parameters) {
  for (const auto& parameter : parameters) parameter->value = parameter->value.to(kGpu);
}

std::vector<Image> draw(const Denoiser& denoiser, const std::string& sampler, at::Device device) {
  SampleOptions options{.sampler = sampler_config(sampler, 6, objective_config("iddpm")),
                        .images = {0, 1, 2, 3, 4},
                        .conditioning = class_labels_fn({.num_classes = 10}, {0, 1, 2, 3, 4}),
                        .cfg_scale = 2,
                        .batch = 2,
                        .seed = 7,
                        .device = device};
  std::vector<Image> images;
  EXPECT_TRUE(sample_images(denoiser, nullptr, options,
                            [&](int64_t, const Image& image) { images.push_back(image); }));
  return images;
}

TEST_F(CudaSample, DrawsWhatTheCpuDraws) {
  for (const std::string sampler : {"ddpm", "ddim", "dpmpp_2m"}) {
    const auto denoiser = tiny_denoiser({});
    const std::vector<Image> expected = draw(*denoiser, sampler, at::kCPU);
    move_to_gpu(denoiser->parameters());
    const std::vector<Image> got = draw(*denoiser, sampler, kGpu);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i)
      for (size_t byte = 0; byte < got[i].rgb.size(); ++byte)
        ASSERT_LE(std::abs(int(got[i].rgb[byte]) - int(expected[i].rgb[byte])), 1) << sampler << " " << i;
  }
}

TEST_F(CudaSample, NoiseHasTheSameBitsOnEveryDevice) {
  const at::Tensor cpu = step_noise(3, {0, 7, 12}, {4, 8, 8}, 5),
                   gpu = step_noise(3, {0, 7, 12}, {4, 8, 8}, 5, kGpu);
  EXPECT_TRUE(gpu.is_cuda());
  EXPECT_TRUE(at::equal(gpu.cpu(), cpu));
}

TEST_F(CudaSample, TheAutoencoderAgreesWithTheCpu) {
  const nlohmann::json config = {{"_class_name", "AutoencoderKL"}, {"block_out_channels", {32, 64}},
                                 {"norm_num_groups", 8},           {"layers_per_block", 1},
                                 {"latent_channels", 4},           {"scaling_factor", 0.2}};
  const AutoencoderKl autoencoder(parse_autoencoder_kl_config(config), {});
  initialize_weights(autoencoder.parameters(), 3);
  const at::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(5);
  const at::Tensor pixels = at::randn({2, 3, 64, 64}, generator),
                   latents = at::randn({2, 4, 32, 32}, generator);
  const at::Tensor moments = autoencoder.encode(pixels), pictures = autoencoder.decode(latents);
  move_to_gpu(autoencoder.parameters());
  const auto expect_near = [](const at::Tensor& got, const at::Tensor& expected) {
    EXPECT_LE((got.cpu() - expected).abs().max().item<double>(), 2e-4 * expected.abs().max().item<double>());
  };
  expect_near(autoencoder.encode(pixels.to(kGpu)), moments);
  expect_near(autoencoder.decode(latents.to(kGpu)), pictures);
}

}  // namespace
}  // namespace kiln
