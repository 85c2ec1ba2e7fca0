// SHA-256 (FIPS 180-4), for files that are published with their hash and for notices with a secret.
// Torch-free.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace kiln {

class Sha256 {
 public:
  void add(std::span<const std::byte> bytes);
  // Returns the hash as 64 lower-case hexadecimal digits. REQUIRES: called once, after the last add().
  std::string finish();
  // Returns it as bytes. REQUIRES: likewise.
  std::array<std::byte, 32> digest();

 private:
  void compress(const std::byte* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, 64> pending_{};
  uint64_t num_bytes_ = 0;
};

// Throws Error when the file cannot be read.
std::string sha256_of_file(const std::string& path);

// Returns HMAC-SHA256 (RFC 2104) of a text as 64 lower-case hexadecimal digits: only who has the key can make
// it.
std::string hmac_sha256(std::string_view key, std::string_view text);

}  // namespace kiln
