// The parts of report.html.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "train/plot.h"
#include "train/prediction.h"

namespace kiln {

std::string escape(const std::string& text);
// A number of a log line; NaN when it has none of this name.
double number(const nlohmann::json& line, const char* key);
// (step, value) of every line.
std::vector<PlotPoint> points_of(const std::vector<nlohmann::json>& lines, const char* key, double scale = 1);
// A framed plot; empty when there is nothing to draw.
std::string plot(const PlotOptions& options, const std::vector<PlotSeries>& series);
// One drawn on another, the first one at the bottom, with a legend below.
std::string stacked_plot(const PlotOptions& options, const std::vector<PlotSeries>& parts,
                         const std::vector<PlotSeries>& lines_above = {});

// From log lines: the time of a step by phase, the loader, the GPU (empty where none was watched).
std::string phase_plot(const std::vector<nlohmann::json>& lines);
std::string loader_plots(const std::vector<nlohmann::json>& lines);
std::string gpu_plots(const std::vector<nlohmann::json>& lines);

// Memory by kind over a step, with the line of the measured sum over it when there is one.
std::string memory_plot(const MemoryCurve& by_kind, const MemoryCurve& measured = {});
// RUN/plan.json: prediction against measurement. Empty without it.
std::string plan_section(const std::string& run);

}  // namespace kiln
