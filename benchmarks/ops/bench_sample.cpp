// DiT's sampling loop under guidance, as `kiln sample` runs it, without decoding: image-steps per second.
// Arguments: batch size, sampling steps. benchmarks/peers/sample_dit.py sets it against the original DiT.
#include <ATen/core/grad_mode.h>
#include <benchmark/benchmark.h>

#include "core/aten.h"
#include "diffusion/objective.h"
#include "diffusion/sampler.h"
#include "models/registry.h"
#include "parallel/machine.h"
#include "sample/sampler_loop.h"

namespace kiln {
namespace {

void sample(benchmark::State& state, const std::string& model, at::ScalarType dtype) {
  apply(ComputeSettings{});
  const at::NoGradGuard no_grad;
  const auto denoiser = build_denoiser(model, {}, {.compute_dtype = dtype});
  initialize_weights(*denoiser, 0);
  freeze_weights(*denoiser, dtype);
  const int64_t batch = state.range(0), steps = state.range(1);
  const auto sampler = make_sampler(sampler_config("ddpm", steps, objective_config("iddpm")));
  std::vector<int64_t> images;
  for (int64_t i = 0; i < batch; ++i) images.push_back(i);
  const std::vector<int64_t> shape = {4, 32, 32};
  const Conditioning cond{.class_labels = at::arange(batch, at::kLong)};
  const DenoiseFn denoise = guided_denoiser(
      *denoiser, cond, unconditional(denoiser->shape().conditioning, cond), 4, CfgConvention::kModel);
  for (auto _ : state)
    benchmark::DoNotOptimize(run_sampler(*sampler, start_noise(0, images, shape), denoise,
                                         [&](int64_t step) { return step_noise(0, images, shape, step); }));
  state.SetItemsProcessed(state.iterations() * batch * steps);
}

void s_2(benchmark::State& state, at::ScalarType dtype) { sample(state, "DiT-S/2", dtype); }

BENCHMARK_CAPTURE(s_2, bf16, at::kBFloat16)->Args({8, 10})->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(s_2, f32, at::kFloat)->Args({8, 10})->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace kiln
