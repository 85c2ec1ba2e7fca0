// Text in HTML pages and SVG pictures. Torch-free.
#pragma once
#include <string>

namespace kiln {

// Escapes &, <, > and " for texts and attributes of HTML and SVG.
std::string escape(const std::string& text);

}  // namespace kiln
