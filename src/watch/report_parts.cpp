#include "watch/report_parts.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "watch/phase_timers.h"

namespace kiln {

using Json = nlohmann::json;

std::vector<PlotPoint> points_of(const std::vector<Json>& lines, const char* key, double scale) {
  std::vector<PlotPoint> points;
  points.reserve(lines.size());
  for (const Json& line : lines) points.push_back({number(line, "step"), number(line, key) * scale});
  return points;
}

std::vector<PlotPoint> smoothed(const std::vector<PlotPoint>& points) {
  const double decay = 1 - 1 / std::max(1.0, static_cast<double>(points.size()) / 20);
  std::vector<PlotPoint> means;
  double sum = 0, weight = 0;
  for (const PlotPoint& point : points) {
    if (!std::isfinite(point.y)) continue;
    sum = decay * sum + point.y;
    weight = decay * weight + 1;
    means.push_back({point.x, sum / weight});
  }
  return means;
}

std::string plot(const PlotOptions& options, const std::vector<PlotSeries>& series) {
  const std::string svg = line_plot(options, series);
  return svg.empty() ? "" : "<div class=\"plot\">" + svg + "</div>\n";
}

std::string stacked_plot(const PlotOptions& options, const std::vector<PlotSeries>& parts,
                         const std::vector<PlotSeries>& lines_above) {
  std::vector<PlotSeries> stack;
  std::vector<double> heights;
  std::string key;
  for (const PlotSeries& part : parts) {
    PlotSeries sum = part;
    heights.resize(part.points.size());
    for (size_t i = 0; i < part.points.size(); ++i)
      if (std::isfinite(part.points[i].y)) heights[i] += part.points[i].y;
    for (size_t i = 0; i < part.points.size(); ++i) sum.points[i].y = heights[i];
    sum.filled = true;
    sum.name = "";
    stack.insert(stack.begin(), std::move(sum));
  }
  const auto add_key = [&](const PlotSeries& series) {
    key += fmt::format("<span><i style=\"background:{}\"></i>{}</span>", series.color, escape(series.name));
  };
  std::ranges::for_each(parts, add_key);
  for (PlotSeries line : lines_above) {
    add_key(line);
    line.name = "";
    stack.push_back(std::move(line));
  }
  const std::string svg = line_plot(options, stack);
  return svg.empty() ? ""
                     : fmt::format("<div class=\"plot\">{}<div class=\"key\">{}</div></div>\n", svg, key);
}

std::string row(const std::string& name, const std::string& value) {
  return fmt::format("<div><span>{}</span><b>{}</b></div>\n", escape(name), escape(value));
}

std::string phase_plot(const std::vector<Json>& lines) {
  std::vector<PlotSeries> series;
  for (const PhaseGroup& group : phase_groups()) {
    PlotSeries one{.name = group.name, .color = group.color, .points = {}};
    double sum = 0;
    for (const Json& line : lines) {
      if (!line.contains("phase_s")) continue;
      const double seconds = group.seconds(line.at("phase_s"));
      one.points.push_back({number(line, "step"), 1e3 * seconds});
      sum += seconds;
    }
    if (sum > 0) series.push_back(std::move(one));
  }
  return stacked_plot({.title = "Time of a step, ms", .x_label = "step", .from_zero = true}, series);
}

std::string loader_plots(const std::vector<Json>& lines) {
  return plot({.title = "Waiting for data, % of the time", .x_label = "step", .from_zero = true},
              {{.name = "", .color = "#ef4444", .points = points_of(lines, "stall_share", 100)}}) +
         plot({.title = "Batches ready", .x_label = "step", .from_zero = true},
              {{.name = "", .color = "#10b981", .points = points_of(lines, "queue_depth")}});
}

namespace {

// Draws a line for every GPU of the machine that the run has.
std::vector<PlotSeries> busy_series(const std::vector<Json>& lines) {
  constexpr const char* kColors[] = {"#f59e0b", "#2563eb", "#10b981", "#8b5cf6",
                                     "#ef4444", "#0ea5e9", "#d946ef", "#64748b"};
  std::vector<PlotSeries> series;
  for (const Json& line : lines)
    for (size_t i = 0; line.contains("gpus") && i < line.at("gpus").size(); ++i) {
      if (series.size() <= i)
        series.push_back(
            {.name = "GPU " + std::to_string(i), .color = kColors[i % std::size(kColors)], .points = {}});
      if (line.at("gpus")[i].contains("utilisation"))
        series[i].points.push_back(
            {number(line, "step"), 100 * line.at("gpus")[i].at("utilisation").get<double>()});
    }
  if (series.empty())
    series.push_back({.name = "", .color = kColors[0], .points = points_of(lines, "gpu_utilisation", 100)});
  return series;
}

}  // namespace

std::string gpu_plots(const std::vector<Json>& lines) {
  return plot({.title = "GPU busy, % of the time", .x_label = "step", .from_zero = true},
              busy_series(lines)) +
         plot({.title = "GPU power, W", .x_label = "step", .from_zero = true},
              {{.name = "", .color = "#ef4444", .points = points_of(lines, "gpu_watts")}});
}

}  // namespace kiln
