// The optimizer pass over the 33 M parameters of DiT-S/2, against ATen's _fused_adamw_, and against plain
// copying of memory (the share of it that the pass reaches).
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>

#include <cstring>

#include "compare.h"
#include "core/aten.h"
#include "ops/ops.h"

namespace kiln {
namespace {

constexpr int64_t kSize = 33'000'000;

struct Flat {
  at::Tensor master = at::randn({kSize}), grad = at::randn({kSize}), exp_avg = at::zeros({kSize});
  at::Tensor exp_avg_sq = at::zeros({kSize}), compute = at::empty({kSize}, at::kBFloat16);
  std::vector<ops::EmaSlice> emas = {{at::zeros({kSize}), 0.9999}};
};

const ops::AdamWStep kOptions = {
    .lr = 1e-4, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0, .step = 10, .grad_scale = 1};

// Copies the same number of bytes with memcpy, both threads at work.
void copy(const Flat& from, const Flat& to) {
  const auto* source = from.master.const_data_ptr<float>();
  auto* target = to.master.mutable_data_ptr<float>();
  at::parallel_for(0, kSize, 1 << 16, [&](int64_t begin, int64_t end) {
    std::memcpy(target + begin, source + begin, (end - begin) * sizeof(float));
  });
}

// master, grad, exp_avg, exp_avg_sq read; all but grad written.
constexpr double kAdamBytes = kSize * 4.0 * 7;

void adamw_against_fused(benchmark::State& state) {
  Flat flat;
  std::vector<ops::EmaSlice> none;
  const std::vector<at::Tensor> params = {flat.master}, grads = {flat.grad}, m = {flat.exp_avg},
                                v = {flat.exp_avg_sq}, steps = {at::full({}, 10.0f)};
  benchmarks::compare(
      state, kAdamBytes,
      [&] {
        ops::adamw_ema_step_(flat.master, flat.grad, flat.exp_avg, flat.exp_avg_sq, none, nullptr, kOptions);
      },
      [&] { at::_fused_adamw_(params, grads, m, v, {}, steps, 1e-4, 0.9, 0.999, 0, 1e-8, false, false); });
}

// With EMA and compute weights; `other_GB/s` is that of memcpy, 1 / ratio the share of it.
void adamw_ema_cast_against_copy(benchmark::State& state) {
  Flat flat, other;
  const double bytes = kAdamBytes + kSize * (8.0 + 2), copied = kSize * 8.0;
  benchmarks::compare(
      state, bytes,
      [&] {
        ops::adamw_ema_step_(flat.master, flat.grad, flat.exp_avg, flat.exp_avg_sq, flat.emas, &flat.compute,
                             kOptions);
      },
      [&] { copy(flat, other); });
  const double copy_rate = state.counters["other_GB/s"] * copied / bytes;
  state.counters["other_GB/s"] = copy_rate;
  state.counters["ratio"] = state.counters["GB/s"] / copy_rate;
}

void sum_of_squares(benchmark::State& state) {
  const at::Tensor grad = at::randn({kSize});
  benchmarks::compare(
      state, kSize * 4.0, [&] { ops::sum_of_squares(grad); }, [&] { at::linalg_vector_norm(grad); });
}

BENCHMARK(adamw_against_fused)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(adamw_ema_cast_against_copy)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(sum_of_squares)->UseManualTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace kiln
