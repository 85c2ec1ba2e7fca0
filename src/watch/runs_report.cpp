#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/median.h"
#include "core/units.h"
#include "evaluate/protocol.h"
#include "watch/report.h"
#include "watch/report_parts.h"
#include "watch/run_log.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kColors[] = {"#2563eb", "#db2777", "#10b981", "#f59e0b",
                                   "#8b5cf6", "#0ea5e9", "#ef4444", "#64748b"};

struct Run {
  std::string name{}, folder{}, color{};
  std::vector<Json> steps{}, evaluations{};  // lines with a loss; results of evaluations, oldest first
};

Run open_run(const std::string& folder, size_t index) {
  Run run{.name = fs::absolute(folder).lexically_normal().string(), .folder = folder};
  if (run.name.ends_with('/')) run.name.pop_back();
  run.name = fs::path(run.name).filename().string();
  run.color = kColors[index % std::size(kColors)];
  const std::vector<Json> log = read_run_log(folder);
  if (log.empty()) fail("report", "{} is not a run: it has no log.jsonl with a line", folder);
  for (const Json& line : log) {
    if (line.contains("loss")) run.steps.push_back(line);
    if (line.value("event", "") == "evaluation" && line.contains("metrics")) run.evaluations.push_back(line);
  }
  for (Json& line : read_evaluations(folder)) run.evaluations.push_back(std::move(line));
  return run;
}

// Names runs whose folders share a name by their paths, as given.
void name_apart(std::vector<Run>& runs) {
  std::map<std::string, int> counts;
  for (const Run& run : runs) ++counts[run.name];
  for (Run& run : runs)
    if (counts[run.name] > 1) run.name = run.folder;
}

std::string curves(const std::vector<Run>& runs, const PlotOptions& options, const char* key,
                   double scale = 1) {
  std::vector<PlotSeries> series;
  for (const Run& run : runs)
    series.push_back({.name = run.name, .color = run.color, .points = points_of(run.steps, key, scale)});
  return plot(options, series);
}

double last_of(const Run& run, const char* key) {
  return run.steps.empty() ? std::nan("") : number(run.steps.back(), key);
}
double median_of(const Run& run, const char* key) {
  std::vector<double> values;
  for (const PlotPoint& point : points_of(run.steps, key))
    if (std::isfinite(point.y)) values.push_back(point.y);
  return values.empty() ? std::nan("") : median(values);
}
double highest(const Run& run, const char* key) {
  double peak = 0;
  for (const Json& line : run.steps)
    if (const double value = number(line, key); value > peak) peak = value;
  return peak;
}

std::string cell(double value, const char* format = "{:.5g}") {
  return "<td>" + (std::isfinite(value) ? fmt::format(fmt::runtime(format), value) : std::string("-")) +
         "</td>";
}

std::string summary(const std::vector<Run>& runs) {
  std::string html =
      "<h2>Speed and memory</h2>\n<div "
      "class=\"card\"><table><tr><th>run</th><th>steps</th><th>images</th><th>time</th>"
      "<th>loss, last</th><th>images/s, median</th><th>host GB, highest</th><th>GPU GB, highest</th></tr>\n";
  for (const Run& run : runs)
    html += "<tr><td>" + escape(run.name) + "</td>" + cell(last_of(run, "step"), "{:.0f}") +
            cell(last_of(run, "images_seen"), "{:.0f}") + "<td>" +
            (run.steps.empty() ? "-" : duration_text(last_of(run, "train_seconds"))) + "</td>" +
            cell(last_of(run, "loss")) + cell(median_of(run, "images_per_s"), "{:.1f}") +
            cell(highest(run, "peak_host_bytes") / 1e9, "{:.2f}") +
            cell(highest(run, "peak_device_bytes") / 1e9, "{:.2f}") + "</tr>\n";
  return html + "</table></div>\n";
}

// Shows the newest result of each run, in one table per protocol: results under different ones do not
// compare.
std::string metrics(const std::vector<Run>& runs) {
  std::map<std::string, std::map<size_t, Json>> by_stamp;  // by stamp and index of the run
  std::vector<std::string> stamps;
  for (size_t i = 0; i < runs.size(); ++i)
    for (const Json& result : runs[i].evaluations) {
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
    figures += figure(newest.string(), run.name + ", " + newest.stem().string());
  }
  return figures.empty() ? "" : "<h2>Newest samples</h2>\n<div class=\"samples\">\n" + figures + "</div>\n";
}

}  // namespace

void write_runs_report(const std::vector<std::string>& folders, const std::string& out) {
  std::vector<Run> runs;
  for (const std::string& folder : folders) runs.push_back(open_run(folder, runs.size()));
  name_apart(runs);
  const std::string plots =
      "<div class=\"plots\">\n" + curves(runs, {.title = "Loss", .x_label = "step", .log_y = true}, "loss") +
      curves(runs, {.title = "Throughput, images/s", .x_label = "step", .from_zero = true}, "images_per_s") +
      curves(runs, {.title = "Host memory, GB", .x_label = "step", .from_zero = true}, "host_bytes", 1e-9) +
      curves(runs, {.title = "Learning rate", .x_label = "step", .from_zero = true}, "lr") + "</div>\n";
  write_file_atomically(
      "report", out,
      page(fmt::format("{} runs", runs.size()), "<p>Losses of different objectives do not compare.</p>\n" +
                                                    summary(runs) + metrics(runs) + plots + grids(runs)));
}

}  // namespace kiln
