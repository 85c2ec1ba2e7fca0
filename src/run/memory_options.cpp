#include "run/memory_options.h"

#include "core/error.h"
#include "core/units.h"

namespace kiln {

int64_t MemoryBudget::parse_size(const char* option, const std::string& text) {
  const int64_t bytes = byte_size(text);
  if (bytes == 0) fail("plan", "--{} expects a size such as 12G, 11.5GiB or 800M, got '{}'", option, text);
  return bytes;
}

MemoryBudget MemoryBudget::parse(const std::string& text) {
  MemoryBudget budget;
  budget.text_ = text;
  if (text.empty() || text == "auto") return budget;
  budget.bytes_ = byte_size(text);
  if (budget.bytes_ == 0)
    fail("train", "--memory-budget expects auto or a size such as 12G, 11.5GiB or 800M, got '{}'", text);
  return budget;
}

}  // namespace kiln
