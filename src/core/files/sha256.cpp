#include "core/files/sha256.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <vector>

#include "core/error.h"
#include "core/files/input_file.h"

namespace kiln {
namespace {

using Digest = std::array<unsigned char, 32>;

std::string hex_digits(const Digest& digest) {
  std::string text;
  for (const unsigned char byte : digest) fmt::format_to(std::back_inserter(text), "{:02x}", byte);
  return text;
}

}  // namespace

std::string sha256_of_file(const std::string& path) {
  const RandomAccessFile file("sha256", path);
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> hash(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  bool is_good = hash && EVP_DigestInit_ex(hash.get(), EVP_sha256(), nullptr) == 1;
  std::vector<std::byte> buffer(1 << 20);
  for (int64_t offset = 0; offset < file.size(); offset += std::ssize(buffer)) {
    buffer.resize(static_cast<size_t>(std::min(std::ssize(buffer), file.size() - offset)));
    file.read(offset, buffer);
    is_good = is_good && EVP_DigestUpdate(hash.get(), buffer.data(), buffer.size()) == 1;
  }
  Digest digest;
  if (!is_good || EVP_DigestFinal_ex(hash.get(), digest.data(), nullptr) != 1)
    fail("sha256", "OpenSSL could not hash {}", path);
  return hex_digits(digest);
}

std::string hmac_sha256(std::string_view key, std::string_view text) {
  Digest digest;
  if (!HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
            reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data(), nullptr))
    fail("sha256", "OpenSSL could not sign a text");
  return hex_digits(digest);
}

}  // namespace kiln
