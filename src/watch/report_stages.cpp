// The stages of a run, and its losses by stage, by source and by bucket.
#include <map>

#include "run/stage_options.h"
#include "watch/report_parts.h"

namespace kiln {

namespace {

using Json = nlohmann::json;

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

std::vector<PlotSeries> by_stage(const std::map<int64_t, ReportedStage>& stages,
                                 const std::vector<Json>& lines) {
  std::vector<PlotSeries> series;
  for (const auto& [first, stage] : stages) series.push_back({.name = stage.name});
  for (const PlotPoint& point : points_of(lines, "loss")) {
    size_t begun = 0;
    for (const auto& [first, stage] : stages) begun += point.x >= static_cast<double>(first) ? 1 : 0;
    if (begun > 0) series[begun - 1].points.push_back(point);
  }
  return series;
}

}  // namespace

void add_losses(Page& page, const char* title, std::vector<PlotSeries> series) {
  for (PlotSeries& one : series) one.points = smoothed(one.points);
  page.plot({.title = title, .log_y = true}, series);
}

void add_stage_table(Page& page, const ReportedRun& run, const std::string& title) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& [step, stage] : stages_of(run))
    rows.push_back({stage.name, std::to_string(step), std::to_string(stage.steps),
                    stage.samples > 0 ? std::to_string(stage.samples) : "-", std::to_string(stage.image_size),
                    fmt::format("{:g}", stage.lr)});
  page.table({"stage", "from step", "steps", "samples", "px", "learning rate"}, rows, title);
}

void add_stages(Page& page, const ReportedRun& run) {
  page.section("Stages, sources, buckets");
  add_stage_table(page, run);
  if (const auto stages = stages_of(run); stages.size() > 1)
    add_losses(page, "Loss by stage", by_stage(stages, run.steps));
  add_losses(page, "Loss by source", series_of(run.steps, "loss_by_source"));
  add_losses(page, "Loss by bucket", series_of(run.steps, "loss_by_bucket"));
}

}  // namespace kiln
