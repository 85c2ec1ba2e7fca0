#include "checkpoint/strict_json.h"

#include <set>
#include <vector>

#include "core/error.h"

namespace kiln {

using nlohmann::json;

json parse_strict_json(std::string_view text, std::string_view who, const std::string& name) {
  std::vector<std::set<std::string>> keys_of_open_objects;
  const auto refuse_duplicates = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) keys_of_open_objects.emplace_back();
    if (event == json::parse_event_t::object_end) keys_of_open_objects.pop_back();
    if (event == json::parse_event_t::array_start && depth > 8)
      fail(who, "the header is nested too deeply ({})", name);
    if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys_of_open_objects.back().insert(key).second) fail(who, "key {:?} occurs twice ({})", key, name);
    }
    return true;
  };
  try {
    return json::parse(text, refuse_duplicates);
  } catch (const json::exception& error) {
    fail(who, "the header is not valid JSON ({}): {}", name, message_of(error));
  }
}

}  // namespace kiln
