// The parts of a run's page. Each adds nothing if the run has nothing of it.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "core/json.h"
#include "core/page/page.h"
#include "watch/prediction.h"
#include "watch/reported_run.h"

namespace kiln {

// Returns a series for each entry of the objects or lists under `key`, by its name or index. `of_entry`: the
// number that is meant of entries that are objects.
std::vector<PlotSeries> series_of(const std::vector<nlohmann::json>& lines, const char* key,
                                  const char* of_entry = "", double scale = 1);
// Returns a number as a table shows it: "-" if it is not finite.
std::string cell_text(double value, const char* format = "{:.5g}");

// Plots memory by kind over a step, with the measured sum as a line if there is one.
void add_memory_plot(Page& page, const MemoryCurve& by_kind, const MemoryCurve& measured = {});
// Compares prediction and measurement, from RUN/plan.json.
void add_plan(Page& page, const std::string& run);

// Results of one name and protocol are one: the last counts.
using NamedResult = std::pair<std::string, nlohmann::json>;
// Divides results by their protocols, in the order of the first of each.
std::vector<std::vector<NamedResult>> by_protocol(const std::vector<NamedResult>& results);
// Adds a table with the metrics and the step of each. `head`: the name of the column of names.
void add_results(Page& page, const std::string& head, const std::vector<NamedResult>& results);
// Adds the metrics of drawn pictures over the steps, and the results of kiln evaluate, with their protocols.
void add_evaluation(Page& page, const ReportedRun& run);

// Plots losses, smoothed.
void add_losses(Page& page, const char* title, std::vector<PlotSeries> series);
// Adds a table of the stages that have begun, and the losses by stage, by source and by bucket.
void add_stages(Page& page, const ReportedRun& run);
void add_stage_table(Page& page, const ReportedRun& run, const std::string& title = "");

}  // namespace kiln
