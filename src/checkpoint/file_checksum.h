// The checksum of a file that several processes write or read together, each its own part, in any order.
// Torch-free.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>

namespace kiln {

// The sum, modulo 2^64, of the XXH3-64 of every block of 64 bytes with the block's number as the seed. The
// last block may be shorter. Nobody has to see the whole file, and the checksum does not depend on how it was
// divided.
class FileChecksum {
 public:
  // Adds the file's bytes from `offset` on. REQUIRES: each byte is added once, here or to a checksum that is
  // merged.
  void add(uint64_t offset, std::span<const std::byte> bytes);
  void merge(const FileChecksum& other);
  // Returns the checksum of a whole file as 16 lower-case hexadecimal digits, or nothing until all its bytes
  // were added.
  std::optional<std::string> of_file(uint64_t file_bytes) const;

  // The form in which it travels between processes.
  friend void to_json(nlohmann::json& json, const FileChecksum& checksum);
  friend void from_json(const nlohmann::json& json, FileChecksum& checksum);

 private:
  static constexpr uint64_t kBlockBytes = 64;
  // A block of which only some bytes were added here.
  struct Fragment {
    std::array<std::byte, kBlockBytes> bytes{};
    uint64_t present = 0;  // bit i: byte i was added
  };
  void add_blocks(uint64_t first, std::span<const std::byte> bytes);
  void add_fragment(uint64_t block, const Fragment& fragment);

  uint64_t sum_ = 0, num_bytes_ = 0;
  std::map<uint64_t, Fragment> fragments_;  // by the block's number
};

// Reads bytes [begin, end) of a file and hashes them. Throws Error, also when the file is shorter.
FileChecksum checksum_of_bytes(const std::string& path, uint64_t begin, uint64_t end);

}  // namespace kiln
