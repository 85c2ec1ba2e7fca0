#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>

#include "evaluate/protocol.h"
#include "watch/report_parts.h"

namespace kiln {
namespace {

using Json = nlohmann::json;
using nlohmann::literals::operator""_json_pointer;

constexpr const char* kMetricColor = "#db2777";

std::string protocol_rows(const Json& protocol) {
  std::string rows;
  for (const auto& [name, value] : protocol_fields(protocol)) rows += row(name, field_text(value));
  return rows;
}

// Plots the metrics of --evaluate-every and lists their protocol.
std::string in_training(const std::vector<Json>& results) {
  if (results.empty()) return "";
  const Json& newest = results.back();
  std::map<std::string, std::vector<PlotPoint>> curves;
  bool has_others = false;  // results under another protocol, which do not belong in the curve
  for (const Json& result : results) {
    if (result.value("stamp", "") != newest.value("stamp", "")) {
      has_others = true;
      continue;
    }
    for (const auto& [name, value] : result["metrics"].items())
      if (value.is_number()) curves[name].push_back({number(result, "step"), value.get<double>()});
  }
  std::string html = "<div class=\"plots\">\n";
  for (const auto& [name, points] : curves)
    html += plot({.title = name, .x_label = "step"}, {{.name = "", .color = kMetricColor, .points = points}});
  html += "</div>\n<p>";
  for (const auto& [name, points] : curves)
    html += escape(name) + " " + fmt::format("{:.5g}", points.back().y) + "&emsp;";
  html += "at the last evaluation. Values compare only under the protocol below";
  html += has_others ? "; earlier ones of this run, measured differently, are left out" : "";
  return html + ".</p>\n<div class=\"card rows\">\n" +
         protocol_rows(newest.value("protocol", Json::object())) + "</div>\n";
}

// Makes a table for each protocol of kiln evaluate, with one row per result.
std::string by_command(const std::vector<Json>& results) {
  std::vector<std::string> stamps;
  for (const Json& result : results)
    if (const std::string stamp = result.value("stamp", ""); std::ranges::find(stamps, stamp) == stamps.end())
      stamps.push_back(stamp);
  std::string html;
  for (const std::string& stamp : stamps) {
    std::vector<const Json*> rows;
    std::set<std::string> names;
    for (const Json& result : results) {
      if (result.value("stamp", "") != stamp) continue;
      rows.push_back(&result);
      for (const auto& [name, value] : result["metrics"].items()) names.insert(name);
    }
    html +=
        "<p>By kiln evaluate, under the protocol below:</p>\n<div class=\"card\"><table><tr><th>samples</th>";
    for (const std::string& name : names) html += "<th>" + escape(name) + "</th>";
    html += "</tr>\n";
    for (const Json* row : rows) {
      const std::string samples = row->value("/subject/samples"_json_pointer, "");
      html += "<tr><td>" + escape(std::filesystem::path(samples).filename().string()) + "</td>";
      for (const std::string& name : names) {
        const double value = number(row->at("metrics"), name.c_str());
        html += "<td>" + (std::isfinite(value) ? fmt::format("{:.5g}", value) : std::string("-")) + "</td>";
      }
      html += "</tr>\n";
    }
    html += "</table></div>\n<div class=\"card rows\">\n" + protocol_rows(rows.front()->at("protocol")) +
            "</div>\n";
  }
  return html;
}

}  // namespace

std::string evaluation_section(const ReportedRun& run) {
  const std::string html = in_training(run.in_training) + by_command(run.by_command);
  return html.empty() ? "" : "<h2>Evaluation</h2>\n" + html;
}

}  // namespace kiln
