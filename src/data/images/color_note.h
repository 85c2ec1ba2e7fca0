// What of a file's colours is read otherwise than the file means it. Torch-free.
#pragma once
#include <cstddef>
#include <span>
#include <string>

#include "data/images/image_header.h"

namespace kiln {

// Returns "its colour profile Display P3 is not applied", "CMYK, converted without a profile", "transparent
// parts become white", "16 bits a channel, of which 8 are kept", or "" for a picture that is taken as it is
// meant. A profile that says that it is sRGB counts as none. Damage is not noticed: decoding does that.
std::string color_note(std::span<const std::byte> file, PictureFormat format);

}  // namespace kiln
