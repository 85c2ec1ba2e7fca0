#include "core/files/sha256.h"

#include <gtest/gtest.h>

#include <string>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/files/temporary_folder.h"

namespace kiln {
namespace {

std::string hash_of(const std::string& text) {
  const TemporaryFolder folder("sha256");
  const std::string path = (folder.path() / "file").string();
  write_file_atomically("sha256", path, text);
  return sha256_of_file(path);
}

// The examples of FIPS 180-4.
TEST(Sha256, Standard) {
  EXPECT_EQ(hash_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hash_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hash_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

// Takes more than one read.
TEST(Sha256, AFileOfSeveralParts) {
  EXPECT_EQ(hash_of(std::string(3'000'000, 'a')),
            "2a152c894398719c0570f83fac34ac03a0f6e8e474b995c2403aa5434f7b9dd4");
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
