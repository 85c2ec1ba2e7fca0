// Instantiates once the header templates that nearly every file uses. They would take a third of the compile
// time of each file.
#include <fmt/format-inl.h>

#include "core/json.h"

template class nlohmann::basic_json<>;  // core/pch_base.h declares them extern
template class nlohmann::detail::serializer<nlohmann::json>;

// fmt leaves these to its library, which torch's copy of the headers comes without.
FMT_BEGIN_NAMESPACE
template auto locale_ref::get<std::locale>() const -> std::locale;
namespace detail {
template auto dragonbox::to_decimal(float) noexcept -> dragonbox::decimal_fp<float>;
template auto dragonbox::to_decimal(double) noexcept -> dragonbox::decimal_fp<double>;
template auto thousands_sep_impl(locale_ref) -> thousands_sep_result<char>;
template auto decimal_point_impl(locale_ref) -> char;
template void buffer<char>::append(const char*, const char*);
}  // namespace detail
FMT_END_NAMESPACE
