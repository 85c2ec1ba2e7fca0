// metrics: the distances and scores of `kiln evaluate` from given features.
#include "evaluate/metrics.h"

#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "io.h"
#include "verbs.h"

namespace kiln::conformance {
namespace {

struct MetricsOptions {
  std::string config, inputs, outputs;
};

at::Tensor number(double value) { return at::full({1}, value, at::kDouble); }

Tensors frechet(const JsonConfig&, const Inputs& inputs) {
  FeatureStatistics a, b;
  a.add(inputs.get("features_a", {-1, -1}));
  b.add(inputs.get("features_b", {-1, -1}));
  const GaussianStatistics statistics = a.finish();
  return {{"fid", number(frechet_distance(statistics, b.finish()))},
          {"mu_a", statistics.mu},
          {"sigma_a", statistics.sigma}};
}

Tensors score(const JsonConfig& config, const Inputs& inputs) {
  const InceptionScore score = inception_score(inputs.get("logits", {-1, -1}), config.positive("splits", 10));
  return {{"inception_score_mean", number(score.mean)}, {"inception_score_std", number(score.deviation)}};
}

Tensors coverage(const JsonConfig& config, const Inputs& inputs) {
  const PrecisionRecall result = precision_recall(
      inputs.get("features_a", {-1, -1}), inputs.get("features_b", {-1, -1}), config.positive("k", 3));
  return {{"precision", number(result.precision)}, {"recall", number(result.recall)}};
}

Tensors kid(const JsonConfig&, const Inputs& inputs) {
  return {{"kid",
           number(kernel_distance(inputs.get("features_a", {-1, -1}), inputs.get("features_b", {-1, -1})))}};
}

struct Metric {
  std::string_view type;
  Tensors (*run)(const JsonConfig& config, const Inputs& inputs);
};
constexpr Metric kMetrics[] = {
    {"frechet", frechet}, {"inception_score", score}, {"precision_recall", coverage}, {"kid", kid}};

void run_metrics(const MetricsOptions& options) {
  const nlohmann::json json = read_config(options.config);
  const JsonConfig config("metrics", json);
  const auto type = config.require<std::string>("type");
  for (const Metric& metric : kMetrics)
    if (metric.type == type)
      return write_outputs(options.outputs, metric.run(config, Inputs(options.inputs)));
  fail("metrics", "expected type frechet, inception_score, precision_recall or kid, got \"{}\" ({})", type,
       options.config);
}

}  // namespace

void add_metrics_verb(CLI::App& app) {
  auto options = std::make_shared<MetricsOptions>();
  CLI::App* verb = app.add_subcommand("metrics", "A metric of pictures, from their features");
  verb->add_option("--config", options->config, "JSON config with a type")->required();
  verb->add_option("--inputs", options->inputs, "features_a and features_b, or logits")->required();
  verb->add_option("--outputs", options->outputs, "File to write")->required();
  verb->callback([options] { run_metrics(*options); });
}

}  // namespace kiln::conformance
