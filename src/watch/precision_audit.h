// `kiln probe --audit-precision`: shows where a step casts, which products run in f32, where values overflow,
// and how the time divides among dtypes.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "core/json.h"
#include "core/page/page.h"
#include "step/span.h"

namespace kiln {

struct PrecisionContext {
  at::ScalarType compute_dtype = at::kFloat;
  std::vector<std::string> segments{};  // names
};

// Audits the spans of one step whose operations were timed and whose values were checked. Returns
// {"compute_dtype", "seconds" (of all operations), "num_operations",
//  "by_dtype": [{"dtype", "seconds", "share", "num", "bytes", "flops"}],
//  "casts": [{"segment", "phase", "operation", "from", "to", "num", "bytes", "seconds"}],
//  "f32": [{"segment", "phase", "operation", "is_product", "num", "seconds", "share", "why"}],
//  "overflows": [{"segment", "phase", "operation", "dtype", "values"}],
//  "largest": [{"segment", "dtype", "value", "share_of_range"}],
//  "advice": [sentences]}
// Lists are sorted by time, overflows by their order in the step. "f32" is empty if it is the compute dtype.
nlohmann::json audit_precision(const std::vector<Span>& spans, const PrecisionContext& context);

// Returns the audit as tables for the terminal, with the longest rows of each.
std::string precision_text(const nlohmann::json& audit);
// Adds RUN/precision.json as tables to the report, if there is that file.
void add_precision(Page& page, const std::string& run);

}  // namespace kiln
