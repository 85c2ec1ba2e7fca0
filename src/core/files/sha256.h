// SHA-256 (FIPS 180-4), by OpenSSL, for files that are published with their hash and for notices with a
// secret. Torch-free.
#pragma once
#include <string>
#include <string_view>

namespace kiln {

// Both return 64 lower-case hexadecimal digits.

// Throws Error when the file cannot be read.
std::string sha256_of_file(const std::string& path);

// HMAC-SHA256 (RFC 2104) of a text: only who has the key can make it.
std::string hmac_sha256(std::string_view key, std::string_view text);

}  // namespace kiln
