// Encoding and decoding by the autoencoders of Stable Diffusion and Sana (random weights), as `kiln extract`
// and `kiln sample` run them. Arguments: image side, batch size. benchmarks/peers/vae_encode.py sets them
// against diffusers.
#include <benchmark/benchmark.h>
#include <c10/core/InferenceMode.h>

#include "core/aten.h"
#include "models/autoencoders/autoencoder_dc.h"
#include "models/autoencoders/autoencoder_kl.h"
#include "models/weights.h"

namespace kiln {
namespace {

// What is measured, and the shape of its latents.
struct Measured {
  std::unique_ptr<Autoencoder> autoencoder;
  int64_t channels, downsample;
};

using Make = Measured (*)(at::ScalarType dtype);

Measured with_weights(std::unique_ptr<Autoencoder> autoencoder, int64_t channels, int64_t downsample) {
  initialize_weights(autoencoder->parameters(), /*seed=*/0);
  autoencoder->freeze_weights();
  return {std::move(autoencoder), channels, downsample};
}

Measured kl(at::ScalarType dtype) {
  return with_weights(
      std::make_unique<AutoencoderKl>(AutoencoderKlConfig{}, BuildOptions{.compute_dtype = dtype}), 4, 8);
}

Measured dc(at::ScalarType dtype) {
  return with_weights(std::make_unique<AutoencoderDc>(parse_autoencoder_dc_config(sana_autoencoder_config()),
                                                      BuildOptions{.compute_dtype = dtype}),
                      32, 32);
}

void encode(benchmark::State& state, Make make, at::ScalarType dtype) {
  const c10::InferenceMode inference;
  const Measured measured = make(dtype);
  const int64_t side = state.range(0), batch = state.range(1);
  const at::Tensor images = at::rand({batch, 3, side, side}) * 2 - 1;
  for (auto _ : state) benchmark::DoNotOptimize(measured.autoencoder->encode(images));
  state.SetItemsProcessed(state.iterations() * batch);
}

void decode(benchmark::State& state, Make make, at::ScalarType dtype) {
  const c10::InferenceMode inference;
  const Measured measured = make(dtype);
  const int64_t side = state.range(0) / measured.downsample, batch = state.range(1);
  const at::Tensor latents = at::randn({batch, measured.channels, side, side});
  for (auto _ : state) benchmark::DoNotOptimize(measured.autoencoder->decode(latents));
  state.SetItemsProcessed(state.iterations() * batch);
}

void at_256(benchmark::internal::Benchmark* benchmark) {
  benchmark->Args({256, 8})->UseRealTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(encode, kl_bf16, kl, at::kBFloat16)->Apply(at_256);
BENCHMARK_CAPTURE(encode, kl_f32, kl, at::kFloat)->Apply(at_256);
BENCHMARK_CAPTURE(decode, kl_bf16, kl, at::kBFloat16)->Apply(at_256);
BENCHMARK_CAPTURE(encode, dc_bf16, dc, at::kBFloat16)->Apply(at_256);
BENCHMARK_CAPTURE(decode, dc_bf16, dc, at::kBFloat16)->Apply(at_256);

}  // namespace
}  // namespace kiln
