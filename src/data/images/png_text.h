// Texts that a PNG file carries, such as its title. Torch-free.
#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kiln {

// Keyword and text of every tEXt, zTXt and iTXt chunk, in UTF-8, in the order of the file; empty for a file
// that is no PNG or a broken one. Latin-1, which tEXt has by the standard, is told from UTF-8, which some
// programs write.
std::vector<std::pair<std::string, std::string>> png_texts(std::span<const std::byte> bytes);

}  // namespace kiln
