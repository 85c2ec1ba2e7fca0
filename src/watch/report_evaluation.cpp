#include <algorithm>
#include <cmath>
#include <map>

#include "watch/report_parts.h"

namespace kiln {
namespace {

using Json = nlohmann::json;

constexpr const char* kMetricColor = "#db2777";

std::string protocol_rows(const Json& protocol) {
  std::string rows;
  for (const auto& [path, value] : protocol.flatten().items()) {
    std::string name = path.empty() ? path : path.substr(1);
    std::replace(name.begin(), name.end(), '/', '.');
    const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    rows += "<div><span>" + escape(name) + "</span><b>" + escape(text) + "</b></div>\n";
  }
  return rows;
}

}  // namespace

std::string evaluation_section(const std::vector<Json>& log) {
  std::map<std::string, std::vector<PlotPoint>> curves;
  Json newest;
  for (const Json& line : log)
    if (line.value("event", "") == "evaluation" && line.contains("metrics")) newest = line;
  if (newest.is_null()) return "";
  bool has_others = false;  // measured by another protocol, which a curve cannot mix
  for (const Json& line : log) {
    if (line.value("event", "") != "evaluation" || !line.contains("metrics")) continue;
    if (line.value("stamp", "") != newest.value("stamp", "")) {
      has_others = true;
      continue;
    }
    for (const auto& [name, value] : line["metrics"].items())
      if (value.is_number()) curves[name].push_back({number(line, "step"), value.get<double>()});
  }
  std::string html = "<h2>Evaluation</h2>\n<div class=\"plots\">\n";
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

}  // namespace kiln
