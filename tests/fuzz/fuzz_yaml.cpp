// Any bytes as a YAML config: parsed or refused with an Error.
#include "core/error.h"
#include "core/text/yaml.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    kiln::parse_yaml("fuzz", {reinterpret_cast<const char*>(data), size}, "fuzz");
  } catch (const kiln::Error&) {
  }
  return 0;
}
