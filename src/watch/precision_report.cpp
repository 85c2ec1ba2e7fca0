// Shows a precision audit as tables, on the terminal and in the report.
#include <algorithm>
#include <fstream>

#include "core/error.h"
#include "core/text/html.h"
#include "watch/precision_audit.h"
#include "watch/prediction.h"

namespace kiln {

using Json = nlohmann::json;

namespace {

constexpr size_t kRowsShown = 12;  // per table

// A table for the terminal or the report.
struct Table {
  std::string title;
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;
  size_t num_left_out = 0;
};

std::string milliseconds(const Json& row) {
  return fmt::format("{:.2f}", 1e3 * row.at("seconds").get<double>());
}
std::string percent(const Json& row, const char* key) {
  return fmt::format("{:.1f} %", 100 * row.at(key).get<double>());
}
std::string text(const Json& row, const char* key) { return row.at(key).get<std::string>(); }
std::string count(const Json& row, const char* key) { return std::to_string(row.at(key).get<int64_t>()); }

template <class Row>
void fill(Table& table, const Json& rows, const Row& cells) {
  for (const Json& row : rows)
    if (table.rows.size() < kRowsShown)
      table.rows.push_back(cells(row));
    else
      ++table.num_left_out;
}

std::vector<Table> tables_of(const Json& audit) {
  std::vector<Table> tables;
  Table* table = &tables.emplace_back(Table{"time by dtype", {"dtype", "ms", "share", "operations"}, {}});
  fill(*table, audit.at("by_dtype"), [](const Json& row) {
    return std::vector{text(row, "dtype"), milliseconds(row), percent(row, "share"), count(row, "num")};
  });
  table = &tables.emplace_back(
      Table{"casts", {"segment", "phase", "operation", "from", "to", "times", "bytes", "ms"}, {}});
  fill(*table, audit.at("casts"), [](const Json& row) {
    return std::vector{text(row, "segment"),
                       text(row, "phase"),
                       text(row, "operation"),
                       text(row, "from"),
                       text(row, "to"),
                       count(row, "num"),
                       size_text(row.at("bytes").get<double>()),
                       milliseconds(row)};
  });
  table = &tables.emplace_back(
      Table{"in f32", {"segment", "phase", "operation", "times", "ms", "share", "why"}, {}});
  fill(*table, audit.at("f32"), [](const Json& row) {
    return std::vector{text(row, "segment"), text(row, "phase"),    text(row, "operation"), count(row, "num"),
                       milliseconds(row),    percent(row, "share"), text(row, "why")};
  });
  table = &tables.emplace_back(Table{"overflows", {"segment", "phase", "operation", "dtype", "values"}, {}});
  fill(*table, audit.at("overflows"), [](const Json& row) {
    return std::vector{text(row, "segment"), text(row, "phase"), text(row, "operation"), text(row, "dtype"),
                       count(row, "values")};
  });
  table = &tables.emplace_back(
      Table{"largest values in 16 bits", {"segment", "dtype", "value", "of its range"}, {}});
  fill(*table, audit.at("largest"), [](const Json& row) {
    return std::vector{text(row, "segment"), text(row, "dtype"),
                       fmt::format("{:.4g}", row.at("value").get<double>()), percent(row, "share_of_range")};
  });
  return tables;
}

}  // namespace

std::string precision_text(const Json& audit) {
  std::string lines =
      fmt::format("\nprecision of one step in {}: {} operations, {:.1f} ms\n", text(audit, "compute_dtype"),
                  audit.at("num_operations").get<int64_t>(), 1e3 * audit.at("seconds").get<double>());
  for (const Table& table : tables_of(audit)) {
    if (table.rows.empty()) {
      lines += fmt::format("{}: none\n", table.title);
      continue;
    }
    std::vector<size_t> widths;
    for (const std::string& column : table.columns) widths.push_back(column.size());
    for (const auto& row : table.rows)
      for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    lines += table.title + "\n";
    const auto line = [&](const std::vector<std::string>& cells) {
      std::string made = " ";
      for (size_t i = 0; i < cells.size(); ++i) made += fmt::format(" {:<{}}", cells[i], widths[i] + 1);
      return made.substr(0, made.find_last_not_of(' ') + 1) + "\n";
    };
    lines += line(table.columns);
    for (const auto& row : table.rows) lines += line(row);
    if (table.num_left_out > 0) lines += fmt::format("  and {} more\n", table.num_left_out);
  }
  for (const Json& sentence : audit.at("advice"))
    lines += fmt::format("advice: {}\n", sentence.get<std::string>());
  return lines;
}

std::string precision_section(const std::string& run) {
  std::ifstream file(run + "/precision.json");
  if (!file) return "";
  const Json audit = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!audit.is_object()) return "";
  std::string html =
      fmt::format("<h2>Precision of a step in {}</h2>\n", escape(text(audit, "compute_dtype")));
  for (const Json& sentence : audit.at("advice"))
    html += "<p class=\"finding\">" + escape(sentence.get<std::string>()) + "</p>\n";
  for (const Table& table : tables_of(audit)) {
    if (table.rows.empty()) continue;
    html += fmt::format("<h3>{}</h3>\n<div class=\"plot\"><table><tr>", escape(table.title));
    for (const std::string& column : table.columns) html += fmt::format("<th>{}</th>", escape(column));
    html += "</tr>\n";
    for (const auto& row : table.rows) {
      html += "<tr>";
      for (const std::string& cell : row) html += fmt::format("<td>{}</td>", escape(cell));
      html += "</tr>\n";
    }
    html += "</table></div>\n";
  }
  return html;
}

}  // namespace kiln
