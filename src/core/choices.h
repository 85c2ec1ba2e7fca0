// Enums whose values have names: on the command line, in recipes and in JSON.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"

namespace kiln {

// Specialise it beside the enum with `static constexpr std::pair<E, const char*> kAll[]`, in the order that
// messages list them.
template <class E>
struct Choices;

template <class E>
concept Choice = requires {
  Choices<E>::kAll;
};

// REQUIRES: the value has a name.
template <Choice E>
std::string choice_name(E value) {
  for (const auto& [known, name] : Choices<E>::kAll)
    if (known == value) return name;
  fail("choices", "value {} has no name", static_cast<int64_t>(value));
}

template <Choice E>
std::vector<std::string> choice_names() {
  std::vector<std::string> names;
  for (const auto& [known, name] : Choices<E>::kAll) names.push_back(name);
  return names;
}

template <Choice E>
std::optional<E> find_choice(std::string_view name) {
  for (const auto& [known, its_name] : Choices<E>::kAll)
    if (name == its_name) return known;
  return std::nullopt;
}

// Returns the value of this name. Throws Error saying that `what` expects one of the names.
template <Choice E>
E parse_choice(std::string_view who, std::string_view what, std::string_view name) {
  if (const std::optional<E> found = find_choice<E>(name)) return *found;
  std::string names;
  for (const std::string& known : choice_names<E>()) names += (names.empty() ? "" : ", ") + known;
  fail(who, "{} expects one of {}, got '{}'", what, names, name);
}

}  // namespace kiln
