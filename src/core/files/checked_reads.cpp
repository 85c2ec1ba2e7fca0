#include "core/files/checked_reads.h"

#include "core/files/xxh3.h"

namespace kiln {

std::string columns_xxh3(std::initializer_list<std::span<const std::byte>> columns) {
  std::vector<uint64_t> hashes;
  for (const std::span<const std::byte> column : columns) hashes.push_back(xxh3(column));
  return xxh3_hex(std::as_bytes(std::span(hashes)));
}

}  // namespace kiln
