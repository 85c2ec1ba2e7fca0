// Random draws: normals and uniforms per second on one thread (needed: 200 million normals).
#include <benchmark/benchmark.h>

#include <vector>

#include "core/philox.h"

namespace {

void philox_normals(benchmark::State& state) {
  std::vector<float> out(state.range(0));
  uint64_t index = 0;
  for (auto _ : state) {
    kiln::philox_normal(1, kiln::Draw::kNoise, index++, out);
    benchmark::DoNotOptimize(out.data());
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(philox_normals)->Arg(64)->Arg(4096)->Arg(1 << 20);

void philox_uniforms(benchmark::State& state) {
  uint64_t index = 0;
  for (auto _ : state) benchmark::DoNotOptimize(kiln::philox_uniform(1, kiln::Draw::kTimestep, index++));
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(philox_uniforms);

}  // namespace
