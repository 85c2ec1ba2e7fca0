#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>

#include "core/files/atomic_file.h"
#include "core/units.h"
#include "evaluate/protocol.h"
#include "watch/report.h"
#include "watch/report_parts.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kColors[] = {"#2563eb", "#db2777", "#10b981", "#f59e0b",
                                   "#8b5cf6", "#0ea5e9", "#ef4444", "#64748b"};

struct Run : ReportedRun {
  std::string color{};
};

std::vector<Run> open_runs(const std::vector<std::string>& folders) {
  std::vector<Run> runs;
  runs.reserve(folders.size());
  std::map<std::string, int> counts;
  for (const std::string& folder : folders) {
    runs.push_back({read_reported_run(folder), kColors[runs.size() % std::size(kColors)]});
    ++counts[runs.back().name];
  }
  for (Run& run : runs)  // runs whose folders share a name are named by their paths, as given
    if (counts[run.name] > 1) run.name = run.folder;
  return runs;
}

template <class Points>
std::string curves(const std::vector<Run>& runs, const PlotOptions& options, const Points& points) {
  std::vector<PlotSeries> series;
  series.reserve(runs.size());
  for (const Run& run : runs) series.push_back({.name = run.name, .color = run.color, .points = points(run)});
  return plot(options, series);
}
std::string curves(const std::vector<Run>& runs, const PlotOptions& options, const char* key,
                   double scale = 1) {
  return curves(runs, options, [&](const Run& run) { return points_of(run.steps, key, scale); });
}

std::string cell(double value, const char* format = "{:.5g}") {
  return "<td>" + (std::isfinite(value) ? fmt::format(fmt::runtime(format), value) : std::string("-")) +
         "</td>";
}

// A column of a table with a row for each run.
struct Column {
  const char* name;
  double (*value)(const Run&);  // NaN: the run has none
  const char* format;
};

constexpr Column kColumns[] = {
    {"steps", [](const Run& run) { return static_cast<double>(run.last_step); }, "{:.0f}"},
    {"images", [](const Run& run) { return static_cast<double>(run.images); }, "{:.0f}"},
    {"loss, last", [](const Run& run) { return run.steps.empty() ? NAN : number(run.steps.back(), "loss"); },
     "{:.5g}"},
    {"validation loss, last",
     [](const Run& run) { return run.validation().empty() ? NAN : run.validation().back().y; }, "{:.5g}"},
    {"images/s, median", [](const Run& run) { return run.median("images_per_s"); }, "{:.1f}"},
    {"host GB, highest", [](const Run& run) { return run.highest("peak_host_bytes") / 1e9; }, "{:.2f}"},
    {"GPU GB, highest",
     [](const Run& run) {
       const double bytes = run.highest("peak_device_bytes");
       return bytes > 0 ? bytes / 1e9 : NAN;
     },
     "{:.2f}"}};

// Leaves out columns that no run has a value for.
std::string summary(const std::vector<Run>& runs) {
  std::string html = "<h2>Speed and memory</h2>\n<div class=\"card\"><table><tr><th>run</th><th>time</th>";
  std::vector<Column> columns;
  for (const Column& column : kColumns)
    if (std::ranges::any_of(runs, [&](const Run& run) { return std::isfinite(column.value(run)); })) {
      columns.push_back(column);
      html += fmt::format("<th>{}</th>", column.name);
    }
  html += "</tr>\n";
  for (const Run& run : runs) {
    html += "<tr><td>" + escape(run.name) + "</td><td>" + duration_text(run.seconds) + "</td>";
    for (const Column& column : columns) html += cell(column.value(run), column.format);
    html += "</tr>\n";
  }
  return html + "</table></div>\n";
}

// Returns the rows of those settings that are not the same in all runs. `settings`: of each run.
std::string differing_rows(const std::string& prefix, const std::vector<Json>& settings) {
  std::set<std::string> names;
  for (const Json& of_run : settings)
    for (const auto& [name, value] : of_run.items()) names.insert(name);
  std::string rows;
  for (const std::string& name : names) {
    std::string cells;
    std::set<std::string> values;
    for (const Json& of_run : settings) {
      Json value = of_run.value(name, Json());
      if (value == "") value = nullptr;  // runs of earlier versions lack the option
      values.insert(value.dump());
      cells += "<td>" + escape(value.is_null() ? "not set" : field_text(value)) + "</td>";
    }
    if (values.size() > 1) rows += "<tr><td>" + escape(prefix + name) + "</td>" + cells + "</tr>\n";
  }
  return rows;
}

// Lists the options that are not the same in all runs, except their folders. Configs of models that differ
// are compared key by key, as the runs resolved them.
std::string differing_options(const std::vector<Run>& runs) {
  std::vector<Json> options, configs;
  options.reserve(runs.size());
  configs.reserve(runs.size());
  std::set<Json> given;  // --model-config of the runs
  for (const Run& run : runs) {
    Json& of_run = options.emplace_back(run.options);
    of_run.erase("out");
    const Json config = of_run.value("model-config", Json(""));
    of_run.erase("model-config");
    given.insert(config);
    configs.push_back(run.record.contains("model_config")
                          ? run.record.at("model_config")
                          : Json::parse(field_text(config), nullptr, /*allow_exceptions=*/false));
    if (!configs.back().is_object()) configs.back() = Json::object();
  }
  std::string rows = differing_rows("", options);
  if (given.size() > 1) rows += differing_rows("model-config.", configs);
  if (rows.empty()) return "";
  std::string html = "<h2>Options that differ</h2>\n<div class=\"card\"><table><tr><th>option</th>";
  for (const Run& run : runs) html += "<th>" + escape(run.name) + "</th>";
  return html + "</tr>\n" + rows + "</table></div>\n";
}

std::string stages(const std::vector<Run>& runs) {
  std::string html;
  for (const Run& run : runs)
    if (const std::string table = stage_table(run); !table.empty())
      html += "<h3>" + escape(run.name) + "</h3>\n" + table;
  return html.empty() ? "" : "<h2>Stages</h2>\n" + html;
}

// Shows the newest result of each run, in one table per protocol: results under different ones do not
// compare.
std::string metrics(const std::vector<Run>& runs) {
  std::map<std::string, std::map<size_t, Json>> by_stamp;  // by stamp and index of the run
  std::vector<std::string> stamps;
  for (size_t i = 0; i < runs.size(); ++i)
    for (const auto* results : {&runs[i].in_training, &runs[i].by_command})
      for (const Json& result : *results) {
        const std::string stamp = result.value("stamp", "");
        if (!by_stamp.contains(stamp)) stamps.push_back(stamp);
        by_stamp[stamp][i] = result;
      }
  if (stamps.empty()) return "";
  std::string html = "<h2>Metrics</h2>\n";
  const Json first = by_stamp[stamps[0]].begin()->second["protocol"];
  for (const std::string& stamp : stamps) {
    const auto& results = by_stamp[stamp];
    std::set<std::string> names;
    for (const auto& [run, result] : results)
      for (const auto& [name, value] : result["metrics"].items()) names.insert(name);
    html += "<div class=\"card\"><table><tr><th>protocol " + escape(stamp) + "</th>";
    for (const std::string& name : names) html += "<th>" + escape(name) + "</th>";
    html += "<th>step</th></tr>\n";
    for (const auto& [run, result] : results) {
      html += "<tr><td>" + escape(runs[run].name) + "</td>";
      for (const std::string& name : names) html += cell(number(result["metrics"], name.c_str()));
      html += cell(number(result, "step"), "{:.0f}") + "</tr>\n";
    }
    html += "</table>";
    const auto differences = protocol_differences(first, results.begin()->second["protocol"]);
    if (!differences.empty())
      html += "<p class=\"finding\">Does not compare with the first table; it differs in " +
              escape(fmt::format("{}", fmt::join(differences, "; "))) + "</p>";
    html += "</div>\n";
  }
  return html;
}

std::string grids(const std::vector<Run>& runs) {
  std::string figures;
  for (const Run& run : runs) {
    std::vector<fs::path> paths;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(fs::path(run.folder) / "samples", error))
      if (entry.path().extension() == ".png") paths.push_back(entry.path());
    if (paths.empty()) continue;
    const fs::path newest = *std::ranges::max_element(paths);
    const std::string png = read_grid(newest), drawn = grid_text(png);
    figures += figure(png, run.name + ", " + newest.stem().string() + (drawn.empty() ? "" : ": " + drawn));
  }
  return figures.empty() ? "" : "<h2>Newest samples</h2>\n<div class=\"samples\">\n" + figures + "</div>\n";
}

}  // namespace

void write_runs_report(const std::vector<std::string>& folders, const std::string& out) {
  const std::vector<Run> runs = open_runs(folders);
  const std::string plots =
      "<div class=\"plots\">\n" + curves(runs, {.title = "Loss", .x_label = "step", .log_y = true}, "loss") +
      curves(runs, {.title = "Validation loss", .x_label = "step", .log_y = true},
             [](const Run& run) { return run.validation(); }) +
      curves(runs, {.title = "Throughput, images/s", .x_label = "step", .from_zero = true}, "images_per_s") +
      curves(runs, {.title = "Host memory, GB", .x_label = "step", .from_zero = true}, "host_bytes", 1e-9) +
      curves(runs, {.title = "Learning rate", .x_label = "step", .from_zero = true}, "lr") + "</div>\n";
  write_file_atomically(
      "report", out,
      page(fmt::format("{} runs", runs.size()), "<p>Losses of different objectives do not compare.</p>\n" +
                                                    summary(runs) + differing_options(runs) + stages(runs) +
                                                    metrics(runs) + plots + grids(runs)));
}

}  // namespace kiln
