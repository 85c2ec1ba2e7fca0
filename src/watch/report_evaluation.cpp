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

std::string stamp_of(const Json& result) { return result.value("stamp", ""); }

void add_protocol(Page& page, const Json& protocol) {
  for (const auto& [name, value] : protocol_fields(protocol)) page.row(name, field_text(value));
}

// Plots the metrics of --evaluate-every and lists their protocol.
void add_in_training(Page& page, const std::vector<Json>& results) {
  if (results.empty()) return;
  const Json& newest = results.back();
  std::map<std::string, std::vector<PlotPoint>> curves;
  std::string others;  // results under another protocol, which do not belong in the curve
  for (const Json& result : results) {
    if (stamp_of(result) != stamp_of(newest)) {
      others = "; earlier ones of this run, measured differently, are left out";
      continue;
    }
    for (const auto& [name, value] : result["metrics"].items())
      if (value.is_number()) curves[name].push_back({number(result, "step"), value.get<double>()});
  }
  std::string last;
  for (const auto& [name, points] : curves) {
    page.plot({.title = name}, {{.points = points}});
    last += fmt::format("{}{} {:.5g}", last.empty() ? "" : ", ", name, points.back().y);
  }
  page.text(last + " at the last evaluation. Values compare only under the protocol below" + others + ".");
  add_protocol(page, newest.value("protocol", Json::object()));
}

}  // namespace

std::vector<std::vector<NamedResult>> by_protocol(const std::vector<NamedResult>& results) {
  std::vector<std::vector<NamedResult>> groups;
  for (const NamedResult& result : results) {
    auto group = std::ranges::find_if(groups, [&](const std::vector<NamedResult>& one) {
      return stamp_of(one.front().second) == stamp_of(result.second);
    });
    if (group == groups.end()) group = groups.emplace(groups.end());
    const auto same_name = std::ranges::find(*group, result.first, &NamedResult::first);
    if (same_name == group->end())
      group->push_back(result);
    else
      same_name->second = result.second;
  }
  return groups;
}

std::string cell_text(double value, const char* format) {
  return std::isfinite(value) ? fmt::format(fmt::runtime(format), value) : "-";
}

void add_results(Page& page, const std::string& head, const std::vector<NamedResult>& results) {
  std::set<std::string> metrics;
  for (const auto& [name, result] : results)
    for (const auto& [metric, value] : result.at("metrics").items()) metrics.insert(metric);
  std::vector<std::string> columns = {head};
  columns.insert(columns.end(), metrics.begin(), metrics.end());
  columns.push_back("step");
  std::vector<std::vector<std::string>> rows;
  for (const auto& [name, result] : results) {
    std::vector<std::string>& cells = rows.emplace_back(std::vector{name});
    for (const std::string& metric : metrics)
      cells.push_back(cell_text(number(result.at("metrics"), metric)));
    cells.push_back(cell_text(number(result, "step"), "{:.0f}"));
  }
  page.table(columns, rows);
}

void add_evaluation(Page& page, const ReportedRun& run) {
  page.section("Evaluation");
  add_in_training(page, run.in_training);
  std::vector<NamedResult> by_command;
  for (const Json& result : run.by_command) {
    const std::filesystem::path samples = result.value("/subject/samples"_json_pointer, "");
    by_command.emplace_back(samples.filename().string(), result);
  }
  for (const std::vector<NamedResult>& group : by_protocol(by_command)) {
    page.text("By kiln evaluate, under the protocol below:");
    add_results(page, "samples", group);
    add_protocol(page, group.front().second.at("protocol"));
  }
}

}  // namespace kiln
