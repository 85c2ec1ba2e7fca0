#include "core/files/sha256.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "core/error.h"

namespace kiln {
namespace {

constexpr size_t kBlockBytes = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t big_endian(const std::byte* bytes) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value = value << 8 | static_cast<uint32_t>(bytes[i]);
  return value;
}

}  // namespace

void Sha256::compress(const std::byte* block) {
  uint32_t words[64];
  for (size_t i = 0; i < 16; ++i) words[i] = big_endian(block + 4 * i);
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t a = words[i - 15], b = words[i - 2];
    words[i] = words[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) + words[i - 7] +
               (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                           ((e & f) ^ (~e & g)) + kRounds[i] + words[i];
    const uint32_t second =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + second;
  }
  const uint32_t sums[] = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state_[i] += sums[i];
}

void Sha256::add(std::span<const std::byte> bytes) {
  size_t filled = num_bytes_ % kBlockBytes;
  num_bytes_ += bytes.size();
  while (!bytes.empty()) {
    if (filled == 0 && bytes.size() >= kBlockBytes) {
      compress(bytes.data());
      bytes = bytes.subspan(kBlockBytes);
      continue;
    }
    const size_t count = std::min(kBlockBytes - filled, bytes.size());
    std::memcpy(pending_.data() + filled, bytes.data(), count);
    bytes = bytes.subspan(count);
    filled += count;
    if (filled == kBlockBytes) {
      compress(pending_.data());
      filled = 0;
    }
  }
}

std::array<std::byte, 32> Sha256::digest() {
  const uint64_t num_bits = 8 * num_bytes_;
  const size_t filled = num_bytes_ % kBlockBytes;
  std::vector<std::byte> padding((filled < 56 ? 56 : 120) - filled + 8);
  padding[0] = std::byte{0x80};
  for (size_t i = 0; i < 8; ++i)
    padding[padding.size() - 1 - i] = static_cast<std::byte>(num_bits >> (8 * i));
  add(padding);
  std::array<std::byte, 32> bytes{};
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>(state_[i / 4] >> (24 - 8 * (i % 4)));
  return bytes;
}

std::string Sha256::finish() {
  std::string text;
  for (const std::byte byte : digest())
    fmt::format_to(std::back_inserter(text), "{:02x}", static_cast<unsigned>(byte));
  return text;
}

std::string sha256_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail("sha256", "cannot read {}: {}", path, std::strerror(errno));
  Sha256 hash;
  std::vector<char> buffer(1 << 20);
  while (file.read(buffer.data(), static_cast<std::streamsize>(buffer.size())) || file.gcount() > 0)
    hash.add(std::as_bytes(std::span(buffer.data(), static_cast<size_t>(file.gcount()))));
  return hash.finish();
}

std::string hmac_sha256(std::string_view key, std::string_view text) {
  const auto bytes_of = [](std::string_view bytes) { return std::as_bytes(std::span(bytes)); };
  std::array<std::byte, kBlockBytes> block{};
  if (key.size() <= kBlockBytes) {
    std::ranges::copy(bytes_of(key), block.begin());
  } else {
    Sha256 hash;
    hash.add(bytes_of(key));
    std::ranges::copy(hash.digest(), block.begin());
  }
  const auto padded = [&](std::byte with) {
    std::array<std::byte, kBlockBytes> pad = block;
    for (std::byte& byte : pad) byte ^= with;
    return pad;
  };
  Sha256 inner, outer;
  inner.add(padded(std::byte{0x36}));
  inner.add(bytes_of(text));
  outer.add(padded(std::byte{0x5C}));
  outer.add(inner.digest());
  return outer.finish();
}

}  // namespace kiln
