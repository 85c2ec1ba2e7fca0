// Measured seconds of operations in their exact shapes. A machine's prices start from them, before any model
// of how time grows with work.
#pragma once
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "step/span.h"

namespace kiln {

std::string dtype_text(c10::ScalarType dtype);  // "bf16"
// "kiln::affine bf16": the key of MachineProfile::rates and of the table.
std::string rate_key(const std::string& op_name, c10::ScalarType dtype);

// The seconds are averages of one operation within real steps. They leave out the time between two operations
// (MachineProfile::op_overhead_s), and are at the speed that the machine had when its clock was read.
class OperationTable {
 public:
  bool empty() const { return seconds_.empty(); }
  size_t size() const;
  std::optional<double> seconds(const OpRecord& op) const;
  void set(const OpRecord& op, double seconds);

  // {"OPERATION DTYPE": [[flops, bytes, m, n, k, seconds], ...]}.
  nlohmann::json to_json() const;
  // Throws Error naming the operation whose entry is not such a list or whose time is not positive.
  static OperationTable from_json(const nlohmann::json& json);

 private:
  using Shape = std::array<double, 5>;  // flops, bytes, m, n, k
  static Shape shape_of(const OpRecord& op);
  std::map<std::string, std::map<Shape, double>, std::less<>> seconds_;  // by rate_key
};

}  // namespace kiln
