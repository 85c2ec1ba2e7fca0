// XXH3, the 64-bit checksum of files and weights.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace kiln {

uint64_t xxh3(std::span<const std::byte> bytes);
// The hash as 16 lower-case hexadecimal digits.
std::string xxh3_hex(std::span<const std::byte> bytes);

}  // namespace kiln
