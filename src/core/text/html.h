// Text in HTML pages and SVG pictures. Torch-free.
#pragma once
#include <string>

namespace kiln {

// With &, <, > and " as HTML and SVG hold them, in texts and attributes.
std::string escape(const std::string& text);

}  // namespace kiln
