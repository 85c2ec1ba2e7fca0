// Numbers in texts, and bytes and durations in units for people. Torch-free.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kiln {

inline constexpr int64_t kMiB = 1 << 20;
inline constexpr double kGiB = 1 << 30;
inline double gib(int64_t bytes) { return static_cast<double>(bytes) / kGiB; }
// "12.34", or of less than 0.1 GiB "0.012".
std::string gib_text(int64_t bytes);

inline constexpr double kSecondsPerDay = 86400;

// "5m 03s", "2h 05m", "3d 04h": for progress lines.
std::string duration_text(double seconds);

// Rounds to so many digits, separates thousands and has no exponent: "0.0123", "12.3", "1,230", "856,000".
// "inf" and "nan" are what they are.
std::string number_text(double value, int digits = 4);

// Returns the whole number that the text is; nothing if it is none.
std::optional<int64_t> whole_number(std::string_view text);

// Parses a size in bytes, plain or with K, M, G or T: "12G" and "12GiB" are binary, "12GB" is decimal.
// Returns 0 for what is no size.
int64_t byte_size(const std::string& text);

}  // namespace kiln
