#include "watch/step_bound.h"

#include <algorithm>
#include <array>
#include <map>

#include "core/error.h"
#include "core/tensors.h"
#include "core/units.h"

namespace kiln {

using Json = nlohmann::json;

namespace {

constexpr double kShownShare = 0.01;  // of the time of all operations
constexpr double kLeastSeconds =
    1e-3;  // of a product whose rate counts: the clock's error is small beside it

// Operations of one name and dtype.
struct Row {
  int64_t num = 0;
  double seconds = 0, bound_s = 0;
};

std::string operation_name(const OpRecord& op) {
  for (const auto& [dtype, name] : Choices<at::ScalarType>::kAll)
    if (dtype == op.dtype) return fmt::format("{} {}", op.name, name);
  return op.name;
}

Json operations_json(const std::vector<OpRecord>& ops, const MachineRates& rates) {
  std::map<std::string, Row> rows;
  double all = 0;
  for (const OpRecord& op : ops) {
    Row& row = rows[operation_name(op)];
    ++row.num;
    row.seconds += op.seconds;
    row.bound_s += std::min(bound_of(op, rates), op.seconds);  // its bytes may lie in a cache
    all += op.seconds;
  }
  std::vector<std::pair<std::string, Row>> sorted(rows.begin(), rows.end());
  std::erase_if(sorted, [&](const auto& entry) { return entry.second.seconds <= kShownShare * all; });
  std::ranges::sort(sorted, std::greater{}, [](const auto& entry) { return entry.second.seconds; });
  Json list = Json::array();
  for (const auto& [name, row] : sorted)
    list.push_back({{"operation", name},
                    {"num", row.num},
                    {"seconds", row.seconds},
                    {"bound_s", row.bound_s},
                    {"share", row.seconds / all}});
  return list;
}

std::string summary_of(const Json& bound) {
  return fmt::format(
      "the bound of this model's work is {:.4g} ms here ({} TFLOP/s in its best products, {} GB/s of "
      "memory): "
      "{:.0f} % of it is reached",
      1e3 * bound.at("seconds").get<double>(), number_text(bound.at("flops_per_s").get<double>() / 1e12, 3),
      number_text(bound.at("bytes_per_s").get<double>() / 1e9, 3), 100 * bound.at("share").get<double>());
}

constexpr std::array<const char*, 5> kColumns = {"operation", "times", "ms", "bound, ms", "of the time"};

std::vector<std::vector<std::string>> cells_of(const Json& bound) {
  std::vector<std::vector<std::string>> rows;
  for (const Json& row : bound.at("operations"))
    rows.push_back({row.at("operation"), std::to_string(row.at("num").get<int64_t>()),
                    fmt::format("{:.2f}", 1e3 * row.at("seconds").get<double>()),
                    fmt::format("{:.2f}", 1e3 * row.at("bound_s").get<double>()),
                    fmt::format("{:.1f} %", 100 * row.at("share").get<double>())});
  return rows;
}

}  // namespace

double bound_of(const IdealSegment& segment, const MachineRates& rates) {
  return std::max(segment.flops / rates.flops_per_s, segment.bytes / rates.bytes_per_s);
}

double bound_of(const OpRecord& op, const MachineRates& rates) {
  return bound_of(IdealSegment{.name = {}, .flops = op.flops, .bytes = op.bytes}, rates);
}

MachineRates raised_by(const std::vector<OpRecord>& ops, MachineRates rates) {
  for (const OpRecord& op : ops)
    if (op.seconds >= kLeastSeconds) rates.flops_per_s = std::max(rates.flops_per_s, op.flops / op.seconds);
  return rates;
}

Json bound_json(const std::vector<IdealSegment>& segments, const MachineRates& measured_rates,
                const std::vector<OpRecord>& ops, double measured_s) {
  const MachineRates rates = raised_by(ops, measured_rates);
  double seconds = 0, flops = 0, bytes = 0;
  Json list = Json::array();
  for (const IdealSegment& segment : segments) {
    const double bound_s = bound_of(segment, rates);
    list.push_back(
        {{"name", segment.name}, {"flops", segment.flops}, {"bytes", segment.bytes}, {"seconds", bound_s}});
    seconds += bound_s;
    flops += segment.flops;
    bytes += segment.bytes;
  }
  return {{"seconds", seconds},
          {"share", measured_s > 0 ? seconds / measured_s : 0},
          {"flops", flops},
          {"bytes", bytes},
          {"flops_per_s", rates.flops_per_s},
          {"bytes_per_s", rates.bytes_per_s},
          {"segments", std::move(list)},
          {"operations", operations_json(ops, rates)}};
}

std::string bound_text(const Json& bound) {
  std::string text = summary_of(bound) + "\n";
  const auto line = [&](const auto& cells) {
    text +=
        fmt::format("  {:<44}{:>8}{:>11}{:>12}{:>13}\n", cells[0], cells[1], cells[2], cells[3], cells[4]);
  };
  const auto rows = cells_of(bound);
  if (!rows.empty()) line(kColumns);
  for (const auto& cells : rows) line(cells);
  return text;
}

void add_bound(Page& page, const Json& bound) try {
  page.section("Bound of a step");
  page.text(summary_of(bound));
  page.table({kColumns.begin(), kColumns.end()}, cells_of(bound), "operations above 1 % of a step");
} catch (const Json::exception& error) {
  fail("report", "expected the bound of a step, got {}", error.what());
}

}  // namespace kiln
