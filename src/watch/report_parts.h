// The parts of report.html.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "watch/plot.h"
#include "watch/prediction.h"

namespace kiln {

// A number of a log line; NaN when it has none of this name.
double number(const nlohmann::json& line, const char* key);
// (step, value) of every line.
std::vector<PlotPoint> points_of(const std::vector<nlohmann::json>& lines, const char* key, double scale = 1);
// Exponential mean with a horizon of a twentieth of the run, without the bias of its start.
std::vector<PlotPoint> smoothed(const std::vector<PlotPoint>& points);
// A framed plot; empty when there is nothing to draw.
std::string plot(const PlotOptions& options, const std::vector<PlotSeries>& series);
// Stacks the parts, the first one at the bottom, with a legend below.
std::string stacked_plot(const PlotOptions& options, const std::vector<PlotSeries>& parts,
                         const std::vector<PlotSeries>& lines_above = {});

// A whole document in the report's style; `body` is HTML.
std::string page(const std::string& title, const std::string& body);
// The picture of a file, within the document.
std::string figure(const std::string& png, const std::string& caption);

// Plots of log lines: the time of a step by phase, the loader, the GPU (empty where there was none).
std::string phase_plot(const std::vector<nlohmann::json>& lines);
std::string loader_plots(const std::vector<nlohmann::json>& lines);
std::string gpu_plots(const std::vector<nlohmann::json>& lines);

// Memory by kind over a step, with the line of the measured sum over it when there is one.
std::string memory_plot(const MemoryCurve& by_kind, const MemoryCurve& measured = {});
// Metrics of drawn pictures over the steps, and the results of kiln evaluate (`results`, read_evaluations()),
// each with the protocol that it was measured by. Empty without any.
std::string evaluation_section(const std::vector<nlohmann::json>& log,
                               const std::vector<nlohmann::json>& results);
// RUN/evaluations.jsonl, oldest first; empty if there is none.
std::vector<nlohmann::json> read_evaluations(const std::string& run);

// The loss by stage, by source and by bucket. Empty for a run of one of each.
std::string stage_section(const std::vector<nlohmann::json>& log, const std::vector<nlohmann::json>& lines);

// RUN/plan.json: prediction against measurement. Empty without it.
std::string plan_section(const std::string& run);

}  // namespace kiln
