// Texts that a PNG file carries, such as its title. Torch-free.
#pragma once
#include <cstddef>
#include <span>

#include "data/images/images.h"

namespace kiln {

// Returns the keyword and text of every tEXt, zTXt and iTXt chunk, in UTF-8 and in the order of the file;
// nothing if the file is no PNG or broken. By the standard tEXt is Latin-1, but some programs write UTF-8:
// text that is not UTF-8 is taken as Latin-1.
PngTexts png_texts(std::span<const std::byte> bytes);

}  // namespace kiln
