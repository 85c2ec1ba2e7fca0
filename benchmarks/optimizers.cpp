// The update of every optimizer over the same flat units, in turn in one run: seconds, bytes, and the time
// that a byte takes beside AdamW's, as a page for benchmarks/results.
//
//   bench_optimizers [THREADS [ROUNDS]] > benchmarks/results/optimizers_MACHINE_DATE.md
//
// Bytes are what an update cannot do without: every buffer that the optimizer keeps, and the master, are read
// and written once, gradients are read, the weights that compute are written. Passes over the same memory
// again count nothing.
#include <ATen/Parallel.h>
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "core/aten.h"
#include "models/registry.h"
#include "optim/optimizer.h"
#include "parallel/machine.h"
#include "parallel/zero/flat_unit.h"

namespace kiln {
namespace {

constexpr int64_t kEnoughWeights = int64_t{20} << 20;  // whole blocks until there are so many

struct Model {
  const char* name;
  const char* tensors;
};
constexpr Model kModels[] = {{"DiT-XL/2", "linear layers"},
                             {"Sana-600M", "linear layers, 1x1 and depthwise 3x3 convolutions"}};

// An optimizer and the units it updates.
class Updated {
 public:
  Updated(const std::string& name, const Denoiser& denoiser)
      : optimizer_(make_optimizer({{"type", name}, {"weight_decay", 0.01}})) {
    const auto& segments = denoiser.segments();
    int64_t weights = 0;
    for (size_t s = 1; s + 1 < segments.size() && (s == 1 || weights < kEnoughWeights); ++s) {
      FlatLayout layout{.slots = {}, .size = 0, .alignment = optimizer_->alignment()};
      for (const auto& parameter : segments[s]->parameters())
        if (parameter->trainable) layout.add(parameter->key, parameter->value.sizes().vec());
      weights += layout.size;
      units_.push_back(std::make_unique<FlatUnit>(
          segments[s]->name(), layout,
          FlatUnitOptions{.compute_dtype = at::kBFloat16, .moments = optimizer_->state(layout)}));
      FlatUnit& unit = *units_.back();
      unit.master.normal_();
      unit.grads.normal_();
      for (const at::Tensor& moment : unit.moments) kept_bytes_ += static_cast<int64_t>(moment.nbytes());
    }
    for (const auto& unit : units_) num_weights_ += unit->layout().size;
  }

  double step() {
    const auto begin = std::chrono::steady_clock::now();
    ++update_;
    for (const auto& unit : units_) {
      OptimizerSlice slice{.master = unit->master,
                           .grads = unit->grad_shard,
                           .moments = unit->moments,
                           .compute_weights = &unit->weight_shard,
                           .layout = &unit->layout()};
      optimizer_->step(slice, {.lr = 1e-4, .update = update_, .grad_scale = 0.5});
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  // Master in and out, gradients in f32, weights in bf16; what it keeps in and out.
  double bytes() const { return static_cast<double>(num_weights_ * (8 + 4 + 2) + 2 * kept_bytes_); }
  double kept_for_each() const {
    return static_cast<double>(kept_bytes_) / static_cast<double>(num_weights_);
  }
  int64_t num_weights() const { return num_weights_; }
  size_t num_units() const { return units_.size(); }

 private:
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<std::unique_ptr<FlatUnit>> units_;
  int64_t kept_bytes_ = 0, num_weights_ = 0, update_ = 0;
};

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

void compare(const Model& model, int64_t rounds) {
  at::NoGradGuard no_grad;
  const auto denoiser =
      build_denoiser(model.name, resolve_denoiser_config(model.name, nlohmann::json::object()),
                     {.device = at::kMeta, .outline = true});
  const std::vector<std::string> names = optimizer_names();
  std::vector<Updated> updated;
  for (const std::string& name : names) updated.emplace_back(name, *denoiser);
  std::vector<std::vector<double>> seconds(names.size());
  for (int64_t round = 0; round <= rounds; ++round)
    for (size_t i = 0; i < names.size(); ++i)
      if (const double time = updated[i].step(); round > 0) seconds[i].push_back(time);  // the first warms up
  fmt::print(
      "## Blocks of {} ({})\n\n{} of them, {:.1f} M weights. Medians of {} rounds.\n\n"
      "| optimizer | keeps bytes a weight | moves bytes a weight | ms | GB/s | time of a byte, of AdamW's | "
      "time of a step, of AdamW's |\n|---|---|---|---|---|---|---|\n",
      model.name, model.tensors, updated[0].num_units(), static_cast<double>(updated[0].num_weights()) / 1e6,
      rounds);
  const double adamw = median(seconds[0]), adamw_byte = adamw / updated[0].bytes();
  for (size_t i = 0; i < names.size(); ++i) {
    const double time = median(seconds[i]);
    fmt::print("| {} | {:.2f} | {:.2f} | {:.1f} | {:.1f} | {:.2f} | {:.2f} |\n", names[i],
               updated[i].kept_for_each(), updated[i].bytes() / static_cast<double>(updated[i].num_weights()),
               time * 1e3, updated[i].bytes() / time / 1e9, time / updated[i].bytes() / adamw_byte,
               time / adamw);
  }
  fmt::print("\n");
}

void run(int64_t threads, int64_t rounds) {
  at::set_num_threads(static_cast<int>(threads));
  const std::chrono::year_month_day today{
      std::chrono::floor<std::chrono::days>(std::chrono::system_clock::now())};
  fmt::print(
      "# The update of each optimizer, by the byte\n\n`bench_optimizers {} {}`, {}-{:02}-{:02}, {}. f32 "
      "gradients, bf16 weights for computation, no average. Bytes: each kept buffer and the master are read "
      "and written once, gradients are read, weights for computation are written; a pass over the same "
      "memory again counts nothing.\n\n",
      threads, rounds, static_cast<int>(today.year()), static_cast<unsigned>(today.month()),
      static_cast<unsigned>(today.day()), machine_name(at::kCPU));
  for (const Model& model : kModels) compare(model, rounds);
  fmt::print(
      "## Goals, and what bounds CAME\n\n`adamw-8bit` within 3 times AdamW's step; CAME within 1.5 times "
      "AdamW's time of a byte, which is below what these passes allow. A matrix' row and column means "
      "must be finished before an update is known, the updates' sum of squares before they are clipped, "
      "the means of their distances before the weights move. Gradients are so read three times, means "
      "twice, weights once, of matrices that the caches do not hold: 24 bytes a weight are read and 10 "
      "written, where AdamW reads 16 and writes 14. That is {:.2f} times AdamW's step at one rate for "
      "all bytes, {:.2f} times by the byte as counted above; where a core waits for what it reads, and "
      "writes go on beside that, {:.2f} and {:.2f} times. Tensors that are kept by the element (1x1 "
      "convolutions of `came`) need two passes: 28 bytes read, 18 written, {:.2f} times AdamW's step "
      "where reads count.\n",
      34.0 / 30, 34.0 / 22, 24.0 / 16, 24.0 / 16 * 30 / 22, 28.0 / 16);
}

}  // namespace
}  // namespace kiln

int main(int argc, char** argv) {
  try {
    kiln::run(argc > 1 ? std::atoll(argv[1]) : 2, argc > 2 ? std::atoll(argv[2]) : 9);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
