// Encoding and decoding of the Stable Diffusion VAE (random weights), as `kiln extract` and `kiln sample` run
// it. Arguments: image side, batch size. benchmarks/peers/vae_encode.py sets it against diffusers.
#include <benchmark/benchmark.h>
#include <c10/core/InferenceMode.h>

#include "core/aten.h"
#include "models/autoencoders/autoencoder_kl.h"
#include "models/weights.h"

namespace kiln {
namespace {

std::unique_ptr<AutoencoderKl> sd_vae(at::ScalarType dtype) {
  auto autoencoder =
      std::make_unique<AutoencoderKl>(AutoencoderKlConfig{}, BuildOptions{.compute_dtype = dtype});
  initialize_weights(autoencoder->parameters(), /*seed=*/0);
  autoencoder->freeze_weights();
  return autoencoder;
}

void encode(benchmark::State& state, at::ScalarType dtype) {
  const c10::InferenceMode inference;
  const auto autoencoder = sd_vae(dtype);
  const int64_t side = state.range(0), batch = state.range(1);
  const at::Tensor images = at::rand({batch, 3, side, side}) * 2 - 1;
  for (auto _ : state) benchmark::DoNotOptimize(autoencoder->encode(images));
  state.SetItemsProcessed(state.iterations() * batch);
}

void decode(benchmark::State& state, at::ScalarType dtype) {
  const c10::InferenceMode inference;
  const auto autoencoder = sd_vae(dtype);
  const int64_t side = state.range(0) / 8, batch = state.range(1);
  const at::Tensor latents = at::randn({batch, 4, side, side});
  for (auto _ : state) benchmark::DoNotOptimize(autoencoder->decode(latents));
  state.SetItemsProcessed(state.iterations() * batch);
}

BENCHMARK_CAPTURE(encode, bf16, at::kBFloat16)->Args({256, 8})->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(encode, f32, at::kFloat)->Args({256, 8})->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(decode, bf16, at::kBFloat16)->Args({256, 8})->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace kiln
