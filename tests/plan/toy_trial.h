// A family that a test brings along, through everything that a user does with a model.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>

#include "models/registry.h"
#include "plan/run/make_plan.h"
#include "test_files.h"
#include "train/loop.h"

namespace kiln::test {

// A weight whose draw suits the toys.
inline std::shared_ptr<Parameter> toy_weight(ParameterList& list, const BuildOptions& options,
                                             const std::string& key, at::IntArrayRef sizes) {
  list.push_back(std::make_shared<Parameter>(
      Parameter{.key = key,
                .value = at::empty(sizes, options.outline ? at::Device(at::kMeta) : options.device),
                .init = Init::normal(0.1)}));
  return list.back();
}

// The row of a family of T(config, options) without published models, whose config is the channels and the
// side of what it draws.
template <class T>
Family toy_family(const char* name, const std::map<std::string, nlohmann::json>& (*presets)()) {
  return {
      .name = name,
      .presets = presets,
      .resolve = [](const nlohmann::json& config) { return config; },
      .complete = [](const nlohmann::json& config, const WeightShapes&) { return config; },
      .fit =
          [](const nlohmann::json& config, const ModelNeeds& needs) {
            nlohmann::json fitted = config;
            fitted["channels"] = needs.channels;
            fitted["side"] = needs.height;
            return fitted;
          },
      .build = [](const nlohmann::json& config, const BuildOptions& options) -> std::unique_ptr<Denoiser> {
        return std::make_unique<T>(config, options);
      },
      .recognise = [](const WeightShapes&,
                      const nlohmann::json&) { return std::optional<RecognisedModel>(); },
      .formats = {},
      .size_key = "side",
      .published = {},
      .calibration = {}};
}

// Trains, stops and goes on, recomputes, divides and plans the family of `options`, whose out is a folder to
// make runs in.
inline void try_family(TrainOptions options) {
  const std::filesystem::path folder = options.out;
  options.global_batch = 6;
  options.micro_batch = 4;
  options.max_steps = 6;
  options.watch.peak_tflops = 1;
  options.checkpoints.every = 0;
  options.ema.decays = {0.9};
  const auto weights_of = [&](const char* run) {
    return read_bytes(folder / run / "checkpoints/step-00000006/model.safetensors");
  };
  const Plan plan = make_plan({.train = options});
  EXPECT_GT(plan.num_weights, 0);
  EXPECT_GT(plan.peak_bytes, 0);
  EXPECT_GT(plan.step_s, 0);
  const auto run = [&](const char* name, const auto& change) {
    TrainOptions changed = options;
    changed.out = folder / name;
    change(changed);
    train(changed);
  };
  run("whole", [](TrainOptions&) {});
  ASSERT_FALSE(weights_of("whole").empty());
  run("parts", [](TrainOptions& o) { o.max_steps = 2; });
  run("parts", [](TrainOptions&) {});
  EXPECT_TRUE(weights_of("parts") == weights_of("whole")) << "resumed";
  run("recomputed", [](TrainOptions& o) { o.memory.recompute = SegmentSet::all(); });
  EXPECT_TRUE(weights_of("recomputed") == weights_of("whole")) << "recomputed";
}

}  // namespace kiln::test
