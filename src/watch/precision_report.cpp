// Shows a precision audit as tables, on the terminal and in the report.
#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/text/json_text.h"
#include "watch/precision_audit.h"
#include "watch/prediction.h"

namespace kiln {

using Json = nlohmann::json;

namespace {

constexpr size_t kRowsShown = 12;  // per table

// A table for the terminal or the report.
struct Table {
  std::string title{};
  std::vector<std::string> columns{};
  std::vector<std::vector<std::string>> rows{};
  size_t num_left_out = 0;
};

struct Column {
  const char* head;
  const char* key = head;  // in a row of the audit
};
struct ListOfAudit {
  const char *title, *key;
  std::vector<Column> columns;
};
const ListOfAudit kLists[] = {
    {"time by dtype", "by_dtype", {{"dtype"}, {"ms", "seconds"}, {"share"}, {"operations", "num"}}},
    {"casts",
     "casts",
     {{"segment"},
      {"phase"},
      {"operation"},
      {"from"},
      {"to"},
      {"times", "num"},
      {"bytes"},
      {"ms", "seconds"}}},
    {"in f32",
     "f32",
     {{"segment"}, {"phase"}, {"operation"}, {"times", "num"}, {"ms", "seconds"}, {"share"}, {"why"}}},
    {"overflows", "overflows", {{"segment"}, {"phase"}, {"operation"}, {"dtype"}, {"values"}}},
    {"largest values in 16 bits",
     "largest",
     {{"segment"}, {"dtype"}, {"value"}, {"of its range", "share_of_range"}}}};

std::string text(const Json& row, const std::string& key) {
  const Json& value = row.at(key);
  if (key == "seconds") return fmt::format("{:.2f}", 1e3 * value.get<double>());
  if (key.starts_with("share")) return fmt::format("{:.1f} %", 100 * value.get<double>());
  if (key == "bytes") return size_text(value.get<double>());
  if (key == "value") return fmt::format("{:.4g}", value.get<double>());
  return value.is_string() ? value.get<std::string>() : value.dump();
}

std::vector<Table> tables_of(const Json& audit) {
  std::vector<Table> tables;
  for (const ListOfAudit& list : kLists) {
    Table& table = tables.emplace_back(Table{.title = list.title});
    for (const Column& column : list.columns) table.columns.push_back(column.head);
    for (const Json& row : audit.at(list.key)) {
      if (table.rows.size() == kRowsShown) break;
      std::vector<std::string>& cells = table.rows.emplace_back();
      for (const Column& column : list.columns) cells.push_back(text(row, column.key));
    }
    table.num_left_out = audit.at(list.key).size() - table.rows.size();
  }
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

void add_precision(Page& page, const std::string& run) {
  const std::string path = run + "/precision.json";
  if (!std::filesystem::is_regular_file(path)) return;
  const Json audit = read_json_or_discarded("report", path);
  if (!audit.is_object()) return;
  page.section("Precision of a step in " + text(audit, "compute_dtype"));
  for (const Json& sentence : audit.at("advice")) page.text(sentence.get<std::string>(), "finding");
  for (const Table& table : tables_of(audit)) page.table(table.columns, table.rows, table.title);
}

}  // namespace kiln
