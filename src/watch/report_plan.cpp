// Compares a run with its plan in the report.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>

#include "core/error.h"
#include "watch/report_parts.h"

namespace kiln {

using Json = nlohmann::json;

namespace {

// Kinds of memory and their colours, from the bottom of the stack. Other kinds come above them.
constexpr std::pair<const char*, const char*> kKinds[] = {
    {"master", "#1e3a8a"},      {"weights", "#2563eb"},      {"moments", "#0ea5e9"},
    {"ema", "#67e8f9"},         {"gradients", "#10b981"},    {"constants", "#a7f3d0"},
    {"autoencoder", "#6ee7b7"}, {"text encoder", "#34d399"}, {"feature net", "#5eead4"},
    {"batch", "#fde68a"},       {"activations", "#f59e0b"},  {"recompute", "#f97316"},
    {"attention", "#ef4444"},   {"matmul", "#ec4899"},       {"temporaries", "#a78bfa"}};
constexpr const char* kOtherColor = "#94a3b8";

PlotSeries kind_series(const MemoryCurve& curve, const std::string& kind, const char* color, double scale) {
  PlotSeries series{.name = kind, .color = color, .points = {}};
  for (const MemoryCurve::Point& point : curve.points) {
    const auto found = point.by_kind.find(kind);
    const double bytes = found == point.by_kind.end() ? 0 : static_cast<double>(found->second);
    series.points.push_back({static_cast<double>(series.points.size()), bytes * scale});
  }
  return series;
}

PlotSeries sum_series(const MemoryCurve& curve, double scale) {
  PlotSeries series{.name = "measured", .color = "var(--ink)", .points = {}};
  for (const MemoryCurve::Point& point : curve.points) {
    double bytes = 0;
    for (const auto& [kind, of_kind] : point.by_kind) bytes += static_cast<double>(of_kind);
    series.points.push_back({static_cast<double>(series.points.size()), bytes * scale});
  }
  return series;
}

// Marks where each phase begins for the first time.
std::vector<PlotTick> phase_ticks(const MemoryCurve& curve) {
  std::vector<PlotTick> ticks;
  for (const char* phase : {"forward", "backward", "optimizer"}) {
    const auto found = std::ranges::find(curve.points, phase, &MemoryCurve::Point::phase);
    if (found != curve.points.end())
      ticks.push_back({static_cast<double>(found - curve.points.begin()), phase});
  }
  return ticks;
}

std::string table(const StepFigures& predicted, const StepFigures& measured) {
  std::string html =
      "<div class=\"plot\"><table><tr><th></th><th>predicted</th><th>measured</th><th></th></tr>\n";
  for (const ComparedFigure& figure : compare(predicted, measured)) {
    const double error = figure.relative_error();
    html += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>\n", escape(figure.name),
                        text_of(figure, figure.predicted), text_of(figure, figure.measured),
                        std::isfinite(error) ? fmt::format("{:+.1f} %", 100 * error) : "");
  }
  return html + "</table></div>\n";
}

}  // namespace

std::string memory_plot(const MemoryCurve& by_kind, const MemoryCurve& measured) {
  double highest = 0;
  for (const PlotPoint& point : sum_series(by_kind, 1).points) highest = std::max(highest, point.y);
  const bool small = highest < 1e9;
  const double scale = small ? 1e-6 : 1e-9;
  std::vector<PlotSeries> parts;
  std::map<std::string, bool> known;
  const auto add = [&](const std::string& kind, const char* color) {
    PlotSeries series = kind_series(by_kind, kind, color, scale);
    if (std::ranges::any_of(series.points, [](const PlotPoint& point) { return point.y > 0; }))
      parts.push_back(std::move(series));
  };
  for (const auto& [kind, color] : kKinds) {
    add(kind, color);
    known[kind] = true;
  }
  for (const MemoryCurve::Point& point : by_kind.points)
    for (const auto& [kind, bytes] : point.by_kind)
      if (bytes > 0 && known.emplace(kind, true).second) add(kind, kOtherColor);
  std::vector<PlotSeries> above;
  if (!measured.points.empty()) above.push_back(sum_series(measured, scale));
  return stacked_plot({.title = small ? "Memory over a step, MB" : "Memory over a step, GB",
                       .x_label = "phases of a step, segment by segment",
                       .from_zero = true,
                       .x_ticks = phase_ticks(by_kind)},
                      parts, above);
}

std::string plan_section(const std::string& run) {
  std::ifstream file(run + "/plan.json");
  if (!file) return "";
  const Json comparison = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!comparison.is_object()) return "";
  const StepFigures measured = figures_from_json(comparison.at("measured"));
  if (comparison.at("predicted").is_null()) {
    const std::string plot = memory_plot(measured.curve);
    return plot.empty() ? "" : "<h2>Memory</h2>\n<div class=\"plots\">\n" + plot + "</div>\n";
  }
  const StepFigures predicted = figures_from_json(comparison.at("predicted"));
  std::string html = "<h2>Plan against measurement</h2>\n";
  for (const auto& finding : comparison.at("findings"))
    html += "<p class=\"finding\">" + escape(finding.get<std::string>()) + "</p>\n";
  return html + "<div class=\"plots\">\n" + memory_plot(predicted.curve, measured.curve) +
         table(predicted, measured) + "</div>\n";
}

}  // namespace kiln
