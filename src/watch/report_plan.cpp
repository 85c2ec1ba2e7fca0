// Compares a run with its plan in the report.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include "core/error.h"
#include "core/text/json_text.h"
#include "watch/report_parts.h"
#include "watch/step_bound.h"

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

// Returns the bytes of a kind at each point, or of all kinds if it is "".
std::vector<PlotPoint> bytes_of(const MemoryCurve& curve, const std::string& kind, double scale) {
  std::vector<PlotPoint> points;
  for (const MemoryCurve::Point& point : curve.points) {
    double bytes = 0;
    for (const auto& [name, of_kind] : point.by_kind)
      if (kind.empty() || name == kind) bytes += static_cast<double>(of_kind);
    points.push_back({static_cast<double>(points.size()), bytes * scale});
  }
  return points;
}

// Marks where each phase begins for the first time.
std::vector<std::pair<double, std::string>> phase_ticks(const MemoryCurve& curve) {
  std::vector<std::pair<double, std::string>> ticks;
  for (const char* phase : {"forward", "backward", "optimizer"}) {
    const auto found = std::ranges::find(curve.points, phase, &MemoryCurve::Point::phase);
    if (found != curve.points.end()) ticks.emplace_back(found - curve.points.begin(), phase);
  }
  return ticks;
}

}  // namespace

void add_memory_plot(Page& page, const MemoryCurve& by_kind, const MemoryCurve& measured) {
  std::set<std::string> kinds;  // that have bytes
  double highest = 0;
  for (const MemoryCurve::Point& point : by_kind.points)
    for (const auto& [kind, bytes] : point.by_kind)
      if (bytes > 0) kinds.insert(kind);
  for (const PlotPoint& point : bytes_of(by_kind, "", 1)) highest = std::max(highest, point.y);
  const bool is_small = highest < 1e9;
  const double scale = is_small ? 1e-6 : 1e-9;
  std::vector<PlotSeries> series;
  const auto add = [&](const std::string& kind, const char* color) {
    series.push_back(
        {.name = kind, .color = color, .points = bytes_of(by_kind, kind, scale), .stacked = true});
  };
  for (const auto& [kind, color] : kKinds)
    if (kinds.erase(kind) > 0) add(kind, color);
  for (const std::string& kind : kinds) add(kind, kOtherColor);
  series.push_back({.name = "measured", .color = "var(--ink)", .points = bytes_of(measured, "", scale)});
  page.plot({.title = is_small ? "Memory over a step, MB" : "Memory over a step, GB",
             .x_label = "phases of a step, segment by segment",
             .from_zero = true,
             .x_ticks = phase_ticks(by_kind)},
            series);
}

void add_plan(Page& page, const std::string& run) {
  const std::string path = run + "/plan.json";
  if (!std::filesystem::is_regular_file(path)) return;
  const Json comparison = read_json_or_discarded("report", path);
  for (const char* key : {"measured", "predicted", "findings"})
    if (!comparison.is_object() || !comparison.contains(key)) return;
  if (comparison.contains("bound")) add_bound(page, comparison.at("bound"));
  const StepFigures measured = figures_from_json(comparison.at("measured"));
  if (comparison.at("predicted").is_null()) {
    page.section("Memory");
    return add_memory_plot(page, measured.curve);
  }
  const StepFigures predicted = figures_from_json(comparison.at("predicted"));
  page.section("Plan against measurement");
  for (const auto& finding : comparison.at("findings")) page.text(finding.get<std::string>(), "finding");
  add_memory_plot(page, predicted.curve, measured.curve);
  std::vector<std::vector<std::string>> rows;
  for (const ComparedFigure& figure : compare(predicted, measured)) {
    const double error = figure.relative_error();
    rows.push_back({figure.name, text_of(figure, figure.predicted), text_of(figure, figure.measured),
                    std::isfinite(error) ? fmt::format("{:+.1f} %", 100 * error) : ""});
  }
  page.table({"", "predicted", "measured", ""}, rows);
}

}  // namespace kiln
