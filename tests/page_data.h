// What a page holds, read back from its file.
#pragma once
#include <string>

#include "core/json.h"

namespace kiln::test {

inline const std::string kDataBegin = R"(<script type="application/json" id="data">)";

// The text between the tags, as a browser finds its end.
inline std::string data_text(const std::string& html) {
  const std::size_t begin = html.find(kDataBegin) + kDataBegin.size();
  return html.substr(begin, html.find("</script", begin) - begin);
}

// All parts of a kind, in their order.
inline nlohmann::json parts_of(const nlohmann::json& data, const std::string& kind) {
  nlohmann::json parts = nlohmann::json::array();
  for (const nlohmann::json& section : data.at("sections"))
    for (const nlohmann::json& part : section.at("parts"))
      if (part.at("kind") == kind) parts.push_back(part);
  return parts;
}

}  // namespace kiln::test
