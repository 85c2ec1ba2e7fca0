// `kiln probe --audit-precision`: where a step casts, which of its products run in f32, where values
// overflow, and how its time is divided among dtypes.
#pragma once
#include <ATen/core/Tensor.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "step/span.h"

namespace kiln {

struct PrecisionContext {
  at::ScalarType compute_dtype = at::kFloat;
  std::vector<std::string> segments{};  // names
};

// From the spans of one step whose operations were timed and their values checked:
// {"compute_dtype", "seconds": of all operations, "num_operations",
//  "by_dtype": [{"dtype", "seconds", "share", "num", "bytes", "flops"}],
//  "casts": [{"segment", "phase", "operation", "from", "to", "num", "bytes", "seconds"}],
//  "f32": [{"segment", "phase", "operation", "is_product", "num", "seconds", "share", "why"}],
//  "overflows": [{"segment", "phase", "operation", "dtype", "values"}],
//  "largest": [{"segment", "dtype", "value", "share_of_range"}],
//  "advice": [sentences]}
// Each list by time, the overflows in the order of the step. "f32" is empty where that is the compute dtype.
nlohmann::json audit_precision(const std::vector<Span>& spans, const PrecisionContext& context);

// The result as tables for the terminal, the longest rows of each.
std::string precision_text(const nlohmann::json& audit);
// The same for a report; RUN/precision.json. Empty without it.
std::string precision_section(const std::string& run);

}  // namespace kiln
