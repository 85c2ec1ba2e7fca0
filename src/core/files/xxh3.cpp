#include "core/files/xxh3.h"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

namespace kiln {

uint64_t xxh3(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::string xxh3_hex(std::span<const std::byte> bytes) { return fmt::format("{:016x}", xxh3(bytes)); }

std::string columns_xxh3(std::initializer_list<std::span<const std::byte>> columns) {
  std::vector<uint64_t> hashes;
  for (const std::span<const std::byte> column : columns) hashes.push_back(xxh3(column));
  return xxh3_hex(std::as_bytes(std::span(hashes)));
}

}  // namespace kiln
