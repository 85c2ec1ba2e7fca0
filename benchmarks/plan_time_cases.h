// Configurations of every family, drawn at random, whose step a CPU takes in moments.
#pragma once
#include <initializer_list>
#include <random>

#include "core/error.h"
#include "plan/run/make_plan.h"
#include "plan/trace/trace.h"
#include "run/option_values.h"

namespace kiln {

using Json = nlohmann::json;

// A step of fewer operations is over before it can be timed; of more, or of more memory, it takes too long.
// Products in f32 take about as long as so many in bf16.
inline constexpr double kLeastFlops = 60e9, kMostFlops = 1000e9, kF32Times = 6;
inline constexpr int64_t kMostBytes = int64_t{3} << 30;

// Equal draws from equal seeds on every machine.
class Draws {
 public:
  explicit Draws(uint32_t seed) : engine_(seed) {}
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return *(choices.begin() + static_cast<std::ptrdiff_t>(engine_() % choices.size()));
  }

 private:
  std::mt19937 engine_;
};

inline Json draw_dit(Draws& draws) {
  return {{"model", draws.one_of({"DiT-S/2", "DiT-S/4", "DiT-S/8", "DiT-B/2", "DiT-B/4", "DiT-B/8", "DiT-L/8",
                                  "DiT-XL/8"})},
          {"image-size", draws.one_of({128, 256, 256, 512})}};
}

inline Json draw_pixart(Draws& draws) {
  const int heads = draws.one_of({4, 6, 8, 12});
  return {{"model", "pixart"},
          {"hidden-size", heads * draws.one_of({48, 64, 72})},
          {"num-heads", heads},
          {"depth", draws.one_of({3, 5, 8, 12})},
          {"patch-size", draws.one_of({2, 4})},
          {"image-size", draws.one_of({128, 256, 512})}};
}

inline Json draw_sana(Draws& draws) {
  const int heads = draws.one_of({10, 14, 20, 28});
  return {{"model", "sana"},
          {"objective", "flow"},
          {"num-heads", heads},
          {"hidden-size", heads * 32},
          {"depth", draws.one_of({3, 5, 8})},
          {"patch-size", 1},
          {"image-size", draws.one_of({256, 512})}};
}

inline Json draw_unet(Draws& draws) {
  const Json widths = draws.one_of<Json>({{64, 128}, {64, 128, 128}, {96, 192}, {96, 192, 192}, {128, 256}});
  Json config = {{"block_out_channels", widths},
                 {"layers_per_block", draws.one_of({1, 2})},
                 {"attention_head_dim", draws.one_of({4, 8})}};
  Json down = Json::array(), up = Json::array({"UpBlock2D"});
  for (size_t i = 1; i < widths.size(); ++i) {
    down.push_back("CrossAttnDownBlock2D");
    up.push_back("CrossAttnUpBlock2D");
  }
  down.push_back("DownBlock2D");
  config["down_block_types"] = down;
  config["up_block_types"] = up;
  return {{"model", "unet2d_condition"},
          {"objective", "epsilon"},
          {"image-size", draws.one_of({128, 256})},
          {"model-config", config.dump()}};
}

// What every family has.
inline void draw_common(Draws& draws, Json& drawn) {
  const int batch = draws.one_of({2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48});
  drawn["compute-dtype"] = draws.one_of({"bf16", "bf16", "f32"});
  drawn["global-batch"] = batch;
  if (draws.one_of({0, 0, 0, 1}) && batch > 2) drawn["micro-batch"] = (batch + 1) / 2;
  drawn["recompute"] = draws.one_of({"none", "none", "all"});
  drawn["optimizer"] = draws.one_of({"adamw", "adamw", "adamw-8bit", "came"});
  drawn["ema-decay"] = draws.one_of({"0.9999", "none"});
}

inline TrainOptions drawn_options(const Json& drawn) {
  TrainOptions options;
  for (const auto& [name, value] : drawn.items()) set_option(options, name, value);
  return options;
}

// What a plan's time is of.
inline DataShape timed_shape(const TrainOptions& options) {
  const DataShape data = synthetic_shape(options);
  return usual_shape(data).value_or(data);
}

inline bool is_measurable(const StepTrace& trace) {
  double flops = 0;
  for (const Span& span : trace.spans)
    for (const OpRecord& op : span.ops)
      flops += static_cast<double>(span.times) * op.flops * (op.dtype == at::kFloat ? kF32Times : 1);
  return flops > kLeastFlops && flops < kMostFlops && trace.memory.peak_bytes < kMostBytes;
}

// The case of a number does not depend on those before it. What cannot be trained or measured is drawn again.
inline Json draw_case(uint32_t seed, size_t number) {
  Draws draws(1000 * seed + static_cast<uint32_t>(number));
  constexpr Json (*kFamilies[])(Draws&) = {draw_dit, draw_pixart, draw_sana, draw_unet};
  while (true) {
    Json drawn = kFamilies[number % std::size(kFamilies)](draws);
    draw_common(draws, drawn);
    try {
      const TrainOptions options = drawn_options(drawn);
      if (is_measurable(trace_step(options, timed_shape(options), DryRunDevice::kCpu))) return drawn;
    } catch (const Error&) {
      continue;  // these options do not go together
    }
  }
}

}  // namespace kiln
