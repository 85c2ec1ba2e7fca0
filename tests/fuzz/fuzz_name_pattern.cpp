// A pattern, a line end, and a name: the pattern is refused, or matches in time.
#include "core/error.h"
#include "core/text/name_pattern.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const size_t end = std::min(text.find('\n'), text.size());
  try {
    const kiln::NamePattern pattern("fuzz", "a pattern", text.substr(0, end));
    const volatile bool matches = pattern.matches(std::string_view(text).substr(end));
    static_cast<void>(matches);
  } catch (const kiln::Error&) {
  }
  return 0;
}
