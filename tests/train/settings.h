// Options of training as a line of text.
#pragma once
#include <sstream>
#include <string>

#include "core/json.h"
#include "run/option_values.h"

namespace kiln::test {

// Reads "model=DiT-S/4 depth=3 ema-decay=[0.9,0.5]". A value that is no JSON is text.
inline nlohmann::json settings(const std::string& line) {
  nlohmann::json all = nlohmann::json::object();
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    const std::string name = word.substr(0, word.find('=')), text = word.substr(name.size() + 1);
    all[name] = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (all[name].is_discarded()) all[name] = text;
  }
  return all;
}

// Some of the options changed by name.
inline TrainOptions changed(TrainOptions options, const nlohmann::json& settings) {
  for (const auto& [name, value] : settings.items()) set_option(options, name, value);
  return options;
}
inline TrainOptions changed(TrainOptions options, const char* line) {
  return changed(std::move(options), settings(line));
}

}  // namespace kiln::test

namespace kiln {
using test::changed, test::settings;
}  // namespace kiln
