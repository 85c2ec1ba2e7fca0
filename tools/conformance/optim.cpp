// optim: an optimizer or an EMA over given gradients or weights, step by step.

#include <cmath>
#include <memory>

#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "io.h"
#include "optim/ema.h"
#include "optim/grad_norm.h"
#include "optimizer_config.h"
#include "parallel/zero/flat_unit.h"
#include "verbs.h"

namespace kiln::conformance {
namespace {

struct OptimOptions {
  std::string config, inputs, outputs;
};

// All tensors `prefix`<key> of a file, in one flat unit: master for `param.`, EMA for `ema.`.
FlatUnit flatten(const Inputs& inputs, const std::string& prefix, const Optimizer& optimizer) {
  FlatLayout layout{.slots = {}, .size = 0, .alignment = optimizer.alignment()};
  for (const auto& [name, tensor] : inputs.all())
    if (name.starts_with(prefix)) layout.add(name.substr(prefix.size()), tensor.sizes().vec());
  if (layout.slots.empty())
    fail("optim", "expected tensors {}<key> in {}, found none", prefix, inputs.path());
  const std::vector<StateBuffer> moments = optimizer.state(layout);
  return FlatUnit("optim", std::move(layout), {.moments = moments, .num_emas = 1});
}

void write_all(const Inputs& inputs, const std::string& prefix, const FlatUnit& unit, at::Tensor& buffer) {
  for (size_t i = 0; i < unit.layout().slots.size(); ++i)
    unit.write(buffer, i, inputs.get(prefix + unit.layout().slots[i].key));
}

void read_all(const FlatUnit& unit, const at::Tensor& buffer, const std::string& prefix, Tensors& outputs) {
  for (size_t i = 0; i < unit.layout().slots.size(); ++i)
    outputs[prefix + unit.layout().slots[i].key] = unit.view(buffer, i).clone();
}

struct OptimConfig {
  int64_t steps = 0;
  OptimizerConfig optimizer{};  // none: an EMA
  double ema_decay = 0;
  EmaSchedule ema_schedule = EmaSchedule::kConstant;
};

OptimConfig parse_optim(const nlohmann::json& json) {
  const JsonConfig config("optim", json);
  OptimConfig parsed{.steps = config.require<int64_t>("steps")};
  if (parsed.steps < 1) fail("optim", "expected steps of at least 1, got {}", parsed.steps);
  if (config.get<std::string>("type", "") != "ema") {
    parsed.optimizer = parse_optimizer(json);
    return parsed;
  }
  parsed.ema_decay = config.require<double>("decay");
  if (!(parsed.ema_decay >= 0 && parsed.ema_decay <= 1))
    fail("optim", "expected decay in [0, 1], got {}", parsed.ema_decay);
  parsed.ema_schedule =
      parse_choice<EmaSchedule>("ema", "schedule", config.get<std::string>("schedule", "constant"));
  return parsed;
}

Tensors run_optimizer(const OptimizerConfig& parsed, const Inputs& inputs, int64_t steps) {
  FlatUnit unit = flatten(inputs, "param.", *parsed.optimizer);
  write_all(inputs, "param.", unit, unit.master);
  OptimizerSlice slice{
      .master = unit.master, .grads = unit.grads, .moments = unit.moments, .layout = &unit.layout()};
  Tensors outputs;
  for (int64_t step = 0; step < steps; ++step) {
    write_all(inputs, fmt::format("grad.{}.", step), unit, unit.grads);
    const double grad_norm = std::sqrt(global_sum_of_squares({unit.grads}).item<double>());
    parsed.optimizer->step(slice, {.lr = parsed.lr,
                                   .update = step + 1,
                                   .grad_scale = clip_coefficient(grad_norm, parsed.max_grad_norm)});
    read_all(unit, unit.master, fmt::format("param.{}.", step), outputs);
    if (parsed.max_grad_norm > 0)
      outputs[fmt::format("grad_norm.{}", step)] = at::full({1}, grad_norm, at::kFloat);
  }
  return outputs;
}

// The EMA as training does it: inside the optimizer's pass, here one that leaves the weights alone.
Tensors run_ema(const OptimConfig& config, const Inputs& inputs) {
  const auto optimizer = make_optimizer({{"type", "adamw"}});
  FlatUnit unit = flatten(inputs, "ema.", *optimizer);
  write_all(inputs, "ema.", unit, unit.emas[0]);
  Tensors outputs;
  for (int64_t step = 0; step < config.steps; ++step) {
    write_all(inputs, fmt::format("param.{}.", step), unit, unit.master);
    OptimizerSlice slice{
        .master = unit.master,
        .grads = unit.grads,
        .moments = unit.moments,
        .emas = {{unit.emas[0], ema_decay_at(config.ema_schedule, config.ema_decay, step + 1)}}};
    optimizer->step(slice, {.lr = 0, .update = step + 1});
    read_all(unit, unit.emas[0], fmt::format("ema.{}.", step), outputs);
  }
  return outputs;
}

void run_optim(const OptimOptions& options) {
  const OptimConfig config = parse_config(options.config, parse_optim);
  const Inputs inputs(options.inputs);
  write_outputs(options.outputs, config.optimizer.optimizer
                                     ? run_optimizer(config.optimizer, inputs, config.steps)
                                     : run_ema(config, inputs));
}

}  // namespace

double max_grad_norm_of(const JsonConfig& config) {
  if (!config.has("grad_clip")) return 0;
  const auto max_norm = config.require<double>("grad_clip");
  if (!(max_norm > 0)) fail(config.who(), "expected grad_clip above 0, or null, got {}", max_norm);
  return max_norm;
}

OptimizerConfig parse_optimizer(const nlohmann::json& json) {
  const JsonConfig config("optim", json);
  OptimizerConfig parsed{
      .optimizer = nullptr, .lr = config.require<double>("lr"), .max_grad_norm = max_grad_norm_of(config)};
  nlohmann::json rest = nlohmann::json::object();
  for (const auto& [key, value] : json.items())
    if (!key.starts_with('_') && key != "lr" && key != "grad_clip" && key != "steps") rest[key] = value;
  parsed.optimizer = make_optimizer(rest);
  return parsed;
}

void add_optim_verb(CLI::App& app) {
  auto options = std::make_shared<OptimOptions>();
  CLI::App* verb = app.add_subcommand("optim", "An optimizer or an EMA, step by step");
  verb->add_option("--config", options->config, "JSON config")->required();
  verb->add_option("--inputs", options->inputs,
                   "param.<k> and grad.<s>.<k>; for ema ema.<k> and param.<s>.<k>")
      ->required();
  verb->add_option("--outputs", options->outputs, "File to write")->required();
  verb->callback([options] { run_optim(*options); });
}

}  // namespace kiln::conformance
