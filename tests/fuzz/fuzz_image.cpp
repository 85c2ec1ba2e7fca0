// libFuzzer target: any bytes as a JPEG, PNG or WebP, its header read, decoded, turned and cropped.
#include <cstdint>

#include "core/error.h"
#include "data/images/color_note.h"
#include "data/images/image_header.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  constexpr int64_t kMaxPixels = 1 << 18;  // small: time goes into the parsers
  try {
    const auto bytes = std::as_bytes(std::span(data, size));
    int orientation = 1;
    try {
      const kiln::ImageHeader header = kiln::read_image_header(kiln::bytes_in_memory(bytes), "fuzz");
      orientation = header.orientation;
      kiln::color_note(bytes, header.format);
    } catch (const kiln::Error&) {  // the decoder may make something of it
    }
    const kiln::Image image = kiln::upright(kiln::decode_image(bytes, "fuzz", kMaxPixels), orientation);
    volatile uint8_t sink = kiln::center_crop(image, 8).rgb[0];
    static_cast<void>(sink);
  } catch (const kiln::Error&) {
  }
  return 0;
}
