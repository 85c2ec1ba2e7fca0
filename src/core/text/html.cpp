#include "core/text/html.h"

namespace kiln {

std::string escape(const std::string& text) {
  std::string escaped;
  for (const char c : text)
    escaped += c == '<'   ? "&lt;"
               : c == '>' ? "&gt;"
               : c == '&' ? "&amp;"
               : c == '"' ? "&quot;"
                          : std::string(1, c);
  return escaped;
}

}  // namespace kiln
