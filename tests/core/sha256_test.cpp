#include "core/files/sha256.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "core/error.h"

namespace kiln {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string hash_of(std::string_view text) {
  Sha256 hash;
  hash.add(bytes_of(text));
  return hash.finish();
}

// The examples of FIPS 180-4.
TEST(Sha256, Standard) {
  EXPECT_EQ(hash_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hash_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hash_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hash_of(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// Lengths around the block and the padding, in pieces of every size.
TEST(Sha256, PiecesDoNotMatter) {
  for (const size_t length : {54, 55, 56, 57, 63, 64, 65, 119, 120, 128, 200}) {
    std::string text;
    for (size_t i = 0; i < length; ++i) text += static_cast<char>(i * 7);
    for (size_t piece = 1; piece <= length; ++piece) {
      Sha256 hash;
      for (size_t at = 0; at < length; at += piece)
        hash.add(bytes_of(std::string_view(text).substr(at, piece)));
      ASSERT_EQ(hash.finish(), hash_of(text)) << length << " in pieces of " << piece;
    }
  }
}

// Test cases 1, 2 and 6 of RFC 4231.
TEST(Sha256, Finding3Hmac) {
  EXPECT_EQ(hmac_sha256(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hmac_sha256("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(Sha256, AMissingFileIsAnError) { EXPECT_THROW(sha256_of_file("/nowhere/at/all"), Error); }

}  // namespace
}  // namespace kiln
