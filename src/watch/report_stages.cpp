// Plots the losses of a run by stage, by source and by bucket.
#include <algorithm>
#include <cmath>
#include <map>

#include "watch/report_parts.h"

namespace kiln {

namespace {

using Json = nlohmann::json;

constexpr const char* kGroupColors[] = {"#2563eb", "#f59e0b", "#10b981", "#ef4444",
                                        "#8b5cf6", "#0ea5e9", "#db2777", "#64748b"};

PlotSeries series_of(const std::string& name, size_t index, std::vector<PlotPoint> points) {
  return {.name = name, .color = kGroupColors[index % std::size(kGroupColors)], .points = smoothed(points)};
}

// Returns the last event of each stage, so a stage that was trained again after a kill counts once.
std::map<int64_t, Json> stages_of(const std::vector<Json>& log) {
  std::map<int64_t, Json> stages;  // by their first step
  for (const Json& line : log)
    if (line.value("event", Json()) == "stage") stages[line.at("step").get<int64_t>()] = line;
  return stages;
}

std::string stage_plot(const std::map<int64_t, Json>& stages, const std::vector<Json>& lines) {
  std::vector<PlotSeries> series;
  for (auto stage = stages.begin(); stage != stages.end(); ++stage) {
    const auto next = std::next(stage);
    std::vector<PlotPoint> points;
    for (const PlotPoint& point : points_of(lines, "loss"))
      if (point.x >= static_cast<double>(stage->first) &&
          (next == stages.end() || point.x < static_cast<double>(next->first)))
        points.push_back(point);
    series.push_back(series_of(stage->second.value("name", ""), series.size(), std::move(points)));
  }
  return plot({.title = "Loss by stage", .x_label = "step", .log_y = true}, series);
}

std::string stage_table(const std::map<int64_t, Json>& stages) {
  std::string html =
      "<div class=\"card\"><table><tr><th>stage</th><th>from step</th><th>steps</th><th>samples</th>"
      "<th>px</th><th>learning rate</th></tr>\n";
  for (const auto& [step, stage] : stages)
    html += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:g}</td></tr>\n",
                        escape(stage.value("name", "")), step, stage.value("steps", int64_t{0}),
                        stage.value("samples", int64_t{0}), stage.value("image_size", int64_t{0}),
                        stage.value("lr", 0.0));
  return html + "</table></div>\n";
}

// Plots a curve for each name under `key`.
std::string group_plot(const char* title, const char* key, const std::vector<Json>& lines) {
  std::map<std::string, std::vector<PlotPoint>> groups;
  for (const Json& line : lines)
    if (const auto found = line.find(key); found != line.end())
      for (const auto& [name, loss] : found->items())
        if (loss.is_number()) groups[name].push_back({number(line, "step"), loss.get<double>()});
  std::vector<PlotSeries> series;
  for (auto& [name, points] : groups) series.push_back(series_of(name, series.size(), std::move(points)));
  return plot({.title = title, .x_label = "step", .log_y = true}, series);
}

}  // namespace

std::string stage_section(const std::vector<Json>& log, const std::vector<Json>& lines) {
  const std::map<int64_t, Json> stages = stages_of(log);
  std::string plots = stages.size() > 1 ? stage_plot(stages, lines) : "";
  plots += group_plot("Loss by source", "loss_by_source", lines);
  plots += group_plot("Loss by bucket", "loss_by_bucket", lines);
  if (plots.empty()) return "";
  return "<h2>Stages, sources, buckets</h2>\n" + (stages.empty() ? "" : stage_table(stages)) +
         "<div class=\"plots\">\n" + plots + "</div>\n";
}

}  // namespace kiln
