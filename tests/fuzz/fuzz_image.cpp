// libFuzzer target: any bytes as a JPEG, PNG or WebP, decoded and cropped.
#include <cstdint>

#include "core/error.h"
#include "data/images/images.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  constexpr int64_t kMaxPixels = 1 << 18;  // small: time goes into the parsers
  try {
    const kiln::Image image = kiln::decode_image(std::as_bytes(std::span(data, size)), "fuzz", kMaxPixels);
    volatile uint8_t sink = kiln::center_crop(image, 8).rgb[0];
    static_cast<void>(sink);
  } catch (const kiln::Error&) {
  }
  return 0;
}
