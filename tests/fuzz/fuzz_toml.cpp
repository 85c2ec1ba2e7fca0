// Any bytes as a recipe: parsed or refused with an Error.
#include <cstddef>
#include <cstdint>

#include "core/error.h"
#include "core/toml.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    kiln::parse_toml({reinterpret_cast<const char*>(data), size}, "fuzz");
  } catch (const kiln::Error&) {
  }
  return 0;
}
