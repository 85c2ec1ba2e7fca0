// libFuzzer target: any bytes as a safetensors file. Accepted tensors must be readable to their last byte.
#include <cstdint>

#include "checkpoint/safetensors.h"
#include "core/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  try {
    const auto file = kiln::parse_safetensors(std::as_bytes(std::span(data, size)), "fuzz");
    unsigned sum = 0;
    for (const auto& [name, view] : file->tensors())
      for (const std::byte value : view.bytes) sum += static_cast<unsigned>(value);
    volatile unsigned sink = sum;
    static_cast<void>(sink);
  } catch (const kiln::Error&) {
  }
  return 0;
}
