#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "core/files/atomic_file.h"
#include "core/text/json_text.h"
#include "core/units.h"
#include "evaluate/protocol.h"
#include "watch/report.h"
#include "watch/report_parts.h"

namespace kiln {
namespace {

using Json = nlohmann::json;
using Run = ReportedRun;

std::vector<Run> open_runs(const std::vector<std::string>& folders) {
  std::vector<Run> runs;
  std::map<std::string, int> counts;
  for (const std::string& folder : folders) {
    ++counts[runs.emplace_back(read_reported_run(folder)).name];
    runs.back().grids = read_grids(folder, 1);
  }
  for (Run& run : runs)  // runs whose folders share a name are named by their paths, as given
    if (counts[run.name] > 1) run.name = run.folder;
  return runs;
}

// Plots a curve of every run.
template <class Points>
void add_curves_of(Page& page, const std::vector<Run>& runs, const PlotOptions& options,
                   const Points& points) {
  std::vector<PlotSeries> series;
  for (const Run& run : runs) series.push_back({.name = run.name, .points = std::invoke(points, run)});
  page.plot(options, series);
}

// Leaves out figures that no run has.
void add_summary(Page& page, const std::vector<Run>& runs) {
  std::vector<std::string> columns = {"run",
                                      "time",
                                      "steps",
                                      "images",
                                      "loss, last",
                                      "validation loss, last",
                                      "images/s, median",
                                      "host GB, highest",
                                      "GPU GB, highest"};
  std::vector<std::vector<std::string>> rows;
  for (const Run& run : runs) {
    const auto last = [&](const std::vector<PlotPoint>& points) {
      return points.empty() ? NAN : points.back().y;
    };
    const double device = run.highest("peak_device_bytes");
    rows.push_back({run.name, duration_text(run.seconds), std::to_string(run.last_step),
                    std::to_string(run.images), cell_text(last(points_of(run.steps, "loss"))),
                    cell_text(last(run.validation())), cell_text(run.median("images_per_s"), "{:.1f}"),
                    cell_text(run.highest("peak_host_bytes") / 1e9, "{:.2f}"),
                    cell_text(device > 0 ? device / 1e9 : NAN, "{:.2f}")});
  }
  for (auto i = static_cast<int64_t>(columns.size()); i-- > 1;) {
    const auto column = static_cast<size_t>(i);
    if (std::ranges::any_of(rows, [&](const auto& row) { return row[column] != "-"; })) continue;
    columns.erase(columns.begin() + i);
    for (auto& row : rows) row.erase(row.begin() + i);
  }
  page.table(columns, rows);
}

// Lists the options that are not the same in all runs, except their folders. Configs of models that differ
// are compared key by key, as the runs resolved them.
void add_options(Page& page, const std::vector<Run>& runs) {
  const auto given_config = [](const Run& run) { return run.options.value("model-config", Json("")); };
  const bool configs_differ =
      std::ranges::any_of(runs, [&](const Run& run) { return given_config(run) != given_config(runs[0]); });
  std::vector<std::string> columns = {"option"};
  std::map<std::string, std::vector<Json>> values;  // of every run, by option
  for (size_t i = 0; i < runs.size(); ++i) {
    columns.push_back(runs[i].name);
    Json settings = runs[i].options;
    settings.erase("out");
    settings.erase("model-config");
    const Json config =
        runs[i].record.contains("model_config")
            ? runs[i].record.at("model_config")
            : json_or_discarded("report", field_text(given_config(runs[i])), "a recorded option");
    if (configs_differ && config.is_object())
      for (const auto& [name, value] : config.items()) settings["model-config." + name] = value;
    for (const auto& [name, value] : settings.items()) {
      values[name].resize(runs.size());
      if (value != "") values[name][i] = value;  // runs of earlier versions lack the option
    }
  }
  std::vector<std::vector<std::string>> rows;
  for (const auto& [name, of_runs] : values) {
    if (std::ranges::all_of(of_runs, [&](const Json& value) { return value == of_runs[0]; })) continue;
    std::vector<std::string>& cells = rows.emplace_back(std::vector{name});
    for (const Json& value : of_runs) cells.push_back(value.is_null() ? "not set" : field_text(value));
  }
  page.table(columns, rows);
}

// Shows the newest result of each run, in one table per protocol: results under different ones do not
// compare.
void add_metrics(Page& page, const std::vector<Run>& runs) {
  std::vector<NamedResult> results;
  for (const Run& run : runs)
    for (const auto* of_run : {&run.in_training, &run.by_command})
      for (const Json& result : *of_run) results.emplace_back(run.name, result);
  const std::vector<std::vector<NamedResult>> groups = by_protocol(results);
  for (const std::vector<NamedResult>& group : groups) {
    const Json& result = group.front().second;
    add_results(page, "protocol " + result.value("stamp", ""), group);
    const auto differences =
        protocol_differences(groups.front().front().second.at("protocol"), result.at("protocol"));
    if (!differences.empty())
      page.text(fmt::format("Does not compare with the first table; it differs in {}",
                            fmt::join(differences, "; ")),
                "finding");
  }
}

}  // namespace

Page runs_page(const std::vector<Run>& runs) {
  Page page(fmt::format("{} runs", runs.size()));
  const auto curves = [&](const PlotOptions& options, const char* key, double scale = 1) {
    add_curves_of(page, runs, options, [&](const Run& run) { return points_of(run.steps, key, scale); });
  };
  page.text("Losses of different objectives do not compare.");
  page.section("Speed and memory");
  add_summary(page, runs);
  page.section("Options that differ");
  add_options(page, runs);
  page.section("Stages");
  for (const Run& run : runs) add_stage_table(page, run, run.name);
  page.section("Metrics");
  add_metrics(page, runs);
  page.section("Curves");
  curves({.title = "Loss", .log_y = true}, "loss");
  add_curves_of(page, runs, {.title = "Validation loss", .log_y = true}, &Run::validation);
  curves({.title = "Throughput, images/s", .from_zero = true}, "images_per_s");
  curves({.title = "Host memory, GB", .from_zero = true}, "host_bytes", 1e-9);
  curves({.title = "Learning rate", .from_zero = true}, "lr");
  page.section("Newest samples");
  for (const Run& run : runs)
    for (const ReportedGrid& grid : run.grids)
      page.picture(grid.source, run.name + ", " + grid.name + (grid.drawn.empty() ? "" : ": " + grid.drawn));
  return page;
}

void write_runs_report(const std::vector<std::string>& folders, const std::string& out) {
  write_file_atomically("report", out, runs_page(open_runs(folders)).html());
}

}  // namespace kiln
