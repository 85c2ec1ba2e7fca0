// Recorded operations as lines of text, and their comparison.
#pragma once
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "step/span.h"

namespace kiln::test {

inline std::string described(const OpRecord& op) {
  return fmt::format("{} {} flops {} bytes {}", op.name, c10::toString(op.dtype), op.flops, op.bytes);
}

inline std::vector<std::string> described(const std::vector<OpRecord>& ops) {
  std::vector<std::string> lines;
  for (const OpRecord& op : ops) lines.push_back(described(op));
  return lines;
}

inline std::vector<std::string> described(const std::vector<Span>& spans) {
  std::vector<std::string> lines;
  for (const Span& span : spans)
    for (const OpRecord& op : span.ops)
      lines.push_back(fmt::format("{}, {} of {} in micro-step {}", described(op), name_of(span.phase),
                                  span.segment, span.micro_step));
  return lines;
}

// Every operation, in order.
inline void expect_same_operations(const std::vector<std::string>& planned,
                                   const std::vector<std::string>& real) {
  const auto [here, there] = std::ranges::mismatch(planned, real);
  if (here == planned.end() && there == real.end()) return;
  ADD_FAILURE() << "of " << planned.size() << " and " << real.size() << " operations, number "
                << here - planned.begin() << " is " << (here == planned.end() ? "nothing" : *here)
                << " where the CPU has " << (there == real.end() ? "nothing" : *there);
}

}  // namespace kiln::test
