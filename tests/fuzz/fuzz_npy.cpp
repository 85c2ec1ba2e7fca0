// libFuzzer target: any bytes as a .npy array.
#include <cstdint>

#include "core/error.h"
#include "data/images/npz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  try {
    const kiln::NpyArray array = kiln::parse_npy(std::as_bytes(std::span(data, size)), "fuzz");
    volatile std::size_t sink = array.bytes.size();
    static_cast<void>(sink);
  } catch (const kiln::Error&) {
  }
  return 0;
}
