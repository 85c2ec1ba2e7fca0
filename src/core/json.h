// nlohmann's JSON, with integers that are never read past their range. Every file takes it from here, so that
// all have the same conversions. Torch-free.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

// The library casts a number to the integer that is asked for, whatever its size: 300 becomes 44 in 8 bits,
// and 1e92 is undefined. Here a number out of range throws nlohmann::json::out_of_range; 4.7 is still read
// as 4.
template <class Integer>
struct nlohmann::adl_serializer<
    Integer, std::enable_if_t<std::is_integral_v<Integer> && !std::is_same_v<Integer, bool>>> {
  template <class Json>
  static void from_json(const Json& json, Integer& value) {
    if (!holds(json))
      throw Json::out_of_range::create(406, "number " + json.dump() + " is out of range", &json);
    nlohmann::from_json(json, value);
  }
  template <class Json>
  static void to_json(Json& json, Integer value) noexcept {
    nlohmann::to_json(json, value);
  }

  // Whether a number is in range. True for what is no number, which the library refuses.
  template <class Json>
  static bool holds(const Json& json) {
    if (json.is_number_unsigned())
      return std::in_range<Integer>(*json.template get_ptr<const typename Json::number_unsigned_t*>());
    if (json.is_number_integer())
      return std::in_range<Integer>(*json.template get_ptr<const typename Json::number_integer_t*>());
    if (!json.is_number_float()) return true;
    using Limits = std::numeric_limits<Integer>;
    const double number = std::trunc(*json.template get_ptr<const typename Json::number_float_t*>());
    return number >= static_cast<double>(Limits::min()) && number < std::ldexp(1.0, Limits::digits);
  }
};

namespace kiln {

// Whether `json` is an integer of that type, written without a point.
template <class Integer = int64_t>
bool is_integer(const nlohmann::json& json) {
  return json.is_number_integer() && nlohmann::adl_serializer<Integer>::holds(json);
}

}  // namespace kiln
