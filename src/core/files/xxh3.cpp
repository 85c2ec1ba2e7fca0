#include "core/files/xxh3.h"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

namespace kiln {

uint64_t xxh3(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::string xxh3_hex(std::span<const std::byte> bytes) { return fmt::format("{:016x}", xxh3(bytes)); }

}  // namespace kiln
