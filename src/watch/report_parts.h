// The building blocks of report.html.
#pragma once
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "watch/plot.h"
#include "watch/prediction.h"
#include "watch/reported_run.h"

namespace kiln {

// Returns (step, value) of every line.
std::vector<PlotPoint> points_of(const std::vector<nlohmann::json>& lines, const char* key, double scale = 1);
// Returns the exponential mean with a horizon of a twentieth of the run, without the bias of its start.
std::vector<PlotPoint> smoothed(const std::vector<PlotPoint>& points);
// Returns a framed plot, empty if there is nothing to draw.
std::string plot(const PlotOptions& options, const std::vector<PlotSeries>& series);
// Stacks the parts, with the first at the bottom and a legend below.
std::string stacked_plot(const PlotOptions& options, const std::vector<PlotSeries>& parts,
                         const std::vector<PlotSeries>& lines_above = {});

// Returns a whole document in the report's style. `body` is HTML.
std::string page(const std::string& title, const std::string& body);
// Returns a line of a list of names and values. Both are texts, not HTML.
std::string row(const std::string& name, const std::string& value);
// Returns the bytes of a grid's file, none if it cannot be read.
std::string read_grid(const std::filesystem::path& path);
// Embeds a picture, the bytes of its PNG file, in the document.
std::string figure(const std::string& png, const std::string& caption);
// Returns how a grid was drawn and what it shows, row by row, as the bytes of its file say: "seed 0, ddim in
// 50 steps, guidance 4, ema-0.9999: a bird | two birds". Empty for a grid of an earlier version.
std::string grid_text(const std::string& png);

// Plot log lines: the time of a step by phase, the loader, the GPU (empty without one).
std::string phase_plot(const std::vector<nlohmann::json>& lines);
std::string loader_plots(const std::vector<nlohmann::json>& lines);
std::string gpu_plots(const std::vector<nlohmann::json>& lines);

// Plots memory by kind over a step, with the measured sum as a line if there is one.
std::string memory_plot(const MemoryCurve& by_kind, const MemoryCurve& measured = {});
// Shows the metrics of drawn pictures over the steps and the results of kiln evaluate, each with its
// protocol. Empty without any.
std::string evaluation_section(const ReportedRun& run);

// Lists the stages that have begun; plots the loss by stage, by source and by bucket. Empty for a run with
// one of each.
std::string stage_section(const ReportedRun& run);
// Returns a table of the stages that have begun. Empty without stages.
std::string stage_table(const ReportedRun& run);

// Compares prediction and measurement from RUN/plan.json. Empty without that file.
std::string plan_section(const std::string& run);

}  // namespace kiln
