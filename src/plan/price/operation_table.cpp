#include "plan/price/machine_profile.h"

#include <cmath>

#include "core/error.h"

namespace kiln {

std::string dtype_text(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return "f32";
    case c10::kBFloat16:
      return "bf16";
    case c10::kHalf:
      return "fp16";
    case c10::kFloat8_e4m3fn:
      return "fp8";
    default:
      return c10::toString(dtype);
  }
}

std::string rate_key(const std::string& op_name, c10::ScalarType dtype) {
  return op_name + " " + dtype_text(dtype);
}

OperationTable::Shape OperationTable::shape_of(const OpRecord& op) {
  return {op.flops, op.bytes, static_cast<double>(op.m), static_cast<double>(op.n),
          static_cast<double>(op.k)};
}

size_t OperationTable::size() const {
  size_t size = 0;
  for (const auto& [key, shapes] : seconds_) size += shapes.size();
  return size;
}

std::optional<double> OperationTable::seconds(const OpRecord& op) const {
  const auto entry = seconds_.find(rate_key(op.name, op.dtype));
  if (entry == seconds_.end()) return std::nullopt;
  const auto found = entry->second.find(shape_of(op));
  return found == entry->second.end() ? std::nullopt : std::optional(found->second);
}

void OperationTable::set(const OpRecord& op, double seconds) {
  seconds_[rate_key(op.name, op.dtype)][shape_of(op)] = seconds;
}

nlohmann::json OperationTable::to_json() const {
  nlohmann::json json = nlohmann::json::object();
  for (const auto& [key, shapes] : seconds_)
    for (const auto& [shape, seconds] : shapes)
      json[key].push_back({shape[0], shape[1], shape[2], shape[3], shape[4], seconds});
  return json;
}

OperationTable OperationTable::from_json(const nlohmann::json& json) {
  OperationTable table;
  using Entry = std::array<double, std::tuple_size_v<Shape> + 1>;
  for (const auto& [key, entries] : json.items()) {
    try {
      for (const nlohmann::json& numbers : entries) {
        if (numbers.size() != std::tuple_size_v<Entry>) throw std::invalid_argument("length");
        const auto entry = numbers.get<Entry>();
        if (!(entry.back() > 0) || !std::isfinite(entry.back())) throw std::invalid_argument("seconds");
        table.seconds_[key][{entry[0], entry[1], entry[2], entry[3], entry[4]}] = entry.back();
      }
    } catch (const std::exception&) {
      fail("profile", "expected lists of [flops, bytes, m, n, k, positive seconds] in 'operations' of '{}'",
           key);
    }
  }
  return table;
}

}  // namespace kiln
