// Any bytes as JSON: what is accepted can be copied, printed and parsed again.
#include "core/error.h"
#include "core/text/json_text.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const nlohmann::json value = kiln::parse_json("fuzz", {reinterpret_cast<const char*>(data), size}, "fuzz",
                                                  {.most_values = 100'000});
    const nlohmann::json copy = value;
    if (kiln::parse_json("fuzz", copy.dump(), "again") != value) __builtin_trap();
  } catch (const kiln::Error&) {
  }
  return 0;
}
