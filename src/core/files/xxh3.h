// XXH3, the 64-bit checksum of files, weights and stores. Torch-free.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

namespace kiln {

uint64_t xxh3(std::span<const std::byte> bytes);
// The hash as 16 lower-case hexadecimal digits.
std::string xxh3_hex(std::span<const std::byte> bytes);

// Remembers, one bit each, which large items of a store were compared with their checksums, as they are at
// their first read. Thread-safe. Two threads that read
// an item at once may both compare it.
class FirstReads {
 public:
  explicit FirstReads(int64_t num_items) : words_(static_cast<size_t>((num_items + 63) / 64)) {}

  // Calls `check`, which throws if the item is damaged, unless it has returned for this item before.
  template <class Check>
  void once(int64_t item, const Check& check) const {
    std::atomic<uint64_t>& word = words_[static_cast<size_t>(item / 64)];
    const uint64_t bit = uint64_t{1} << (item % 64);
    if ((word.load(std::memory_order_relaxed) & bit) != 0) return;
    check();
    word.fetch_or(bit, std::memory_order_relaxed);
  }

 private:
  mutable std::vector<std::atomic<uint64_t>> words_;
};

// Returns the XXH3 of the XXH3s of the columns, 16 hexadecimal digits.
std::string columns_xxh3(std::initializer_list<std::span<const std::byte>> columns);

}  // namespace kiln
