// The stages of a run, and its losses by stage, by source and by bucket.
#include <algorithm>
#include <cmath>
#include <map>

#include "run/stage_options.h"
#include "watch/report_parts.h"

namespace kiln {

namespace {

using Json = nlohmann::json;

constexpr const char* kGroupColors[] = {"#2563eb", "#f59e0b", "#10b981", "#ef4444",
                                        "#8b5cf6", "#0ea5e9", "#db2777", "#64748b"};

PlotSeries series_of(const std::string& name, size_t index, const std::vector<PlotPoint>& points) {
  return {.name = name, .color = kGroupColors[index % std::size(kGroupColors)], .points = smoothed(points)};
}

struct ReportedStage {
  std::string name{};
  int64_t steps = 0, samples = 0, image_size = 0;  // samples in a pass; 0: not logged
  double lr = 0;
};

// Sets the samples of stages that the log does not tell: a run that only --continue-with divided has begun
// without stages.
void take_recorded_samples(const Json& trained_on, std::map<int64_t, ReportedStage>& stages) {
  const auto take = [&](const Json& seen) {
    const auto stage = stages.find(seen.value("first_step", int64_t{0}) + 1);
    if (stage != stages.end() && stage->second.samples == 0)
      stage->second.samples = seen.value("samples", int64_t{0});
  };
  take(trained_on);
  for (const Json& earlier : trained_on.value("earlier", Json::array())) take(earlier);
}

// Returns the stages that have begun, by their first step. A checkpoint knows where they ended, also those of
// a run that only --continue-with divided; the log knows the stage that began since, and its samples.
std::map<int64_t, ReportedStage> stages_of(const ReportedRun& run) {
  std::map<int64_t, ReportedStage> stages;
  for (const Json& line : run.log)  // a stage that was trained again after a kill counts once
    if (line.value("event", Json()) == "stage")
      stages[line.at("step").get<int64_t>()] = {.name = line.value("name", ""),
                                                .steps = line.value("steps", int64_t{0}),
                                                .samples = line.value("samples", int64_t{0}),
                                                .image_size = line.value("image_size", int64_t{0}),
                                                .lr = line.value("lr", 0.0)};
  if (!run.saved) return stages;
  size_t index = 0;
  for (const Json& saved : run.saved->config.value("stages", Json::array())) {
    const auto first = saved.at("first_step").get<int64_t>(), last = saved.at("last_step").get<int64_t>();
    if (first >= run.saved->step) break;
    ReportedStage& stage = stages[first + 1];
    stage.name = stage_name(stage_from_json(saved.at("keys")), index++);
    stage.steps = last - first;
    stage.image_size = saved.at("settings").value("image-size", int64_t{0});
    stage.lr = saved.at("settings").value("lr", 0.0);
  }
  take_recorded_samples(run.record.value("trained_on", Json::object()), stages);
  return stages;
}

std::string stage_plot(const std::map<int64_t, ReportedStage>& stages, const std::vector<Json>& lines) {
  std::vector<PlotSeries> series;
  for (auto stage = stages.begin(); stage != stages.end(); ++stage) {
    const auto next = std::next(stage);
    std::vector<PlotPoint> points;
    for (const PlotPoint& point : points_of(lines, "loss"))
      if (point.x >= static_cast<double>(stage->first) &&
          (next == stages.end() || point.x < static_cast<double>(next->first)))
        points.push_back(point);
    series.push_back(series_of(stage->second.name, series.size(), points));
  }
  return plot({.title = "Loss by stage", .x_label = "step", .log_y = true}, series);
}

// Plots a curve for each name under `key`.
std::string group_plot(const char* title, const char* key, const std::vector<Json>& lines) {
  std::map<std::string, std::vector<PlotPoint>> groups;
  for (const Json& line : lines)
    if (const auto found = line.find(key); found != line.end())
      for (const auto& [name, loss] : found->items())
        if (loss.is_number()) groups[name].push_back({number(line, "step"), loss.get<double>()});
  std::vector<PlotSeries> series;
  series.reserve(groups.size());
  for (const auto& [name, points] : groups) series.push_back(series_of(name, series.size(), points));
  return plot({.title = title, .x_label = "step", .log_y = true}, series);
}

}  // namespace

std::string stage_table(const ReportedRun& run) {
  const std::map<int64_t, ReportedStage> stages = stages_of(run);
  if (stages.empty()) return "";
  std::string html =
      "<div class=\"card\"><table><tr><th>stage</th><th>from step</th><th>steps</th><th>samples</th>"
      "<th>px</th><th>learning rate</th></tr>\n";
  for (const auto& [step, stage] : stages)
    html += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:g}</td></tr>\n",
                        escape(stage.name), step, stage.steps,
                        stage.samples > 0 ? std::to_string(stage.samples) : "-", stage.image_size, stage.lr);
  return html + "</table></div>\n";
}

std::string stage_section(const ReportedRun& run) {
  const std::map<int64_t, ReportedStage> stages = stages_of(run);
  std::string plots = stages.size() > 1 ? stage_plot(stages, run.steps) : "";
  plots += group_plot("Loss by source", "loss_by_source", run.steps);
  plots += group_plot("Loss by bucket", "loss_by_bucket", run.steps);
  if (plots.empty()) return "";
  return "<h2>Stages, sources, buckets</h2>\n" + stage_table(run) + "<div class=\"plots\">\n" + plots +
         "</div>\n";
}

}  // namespace kiln
