#include "core/text/utf8.h"

#include <gtest/gtest.h>

namespace kiln {
namespace {

TEST(Utf8, CharactersOfEachLength) {
  EXPECT_EQ(utf8_bytes(""), 0U);
  EXPECT_EQ(utf8_bytes(std::string_view("\0", 1)), 1U);
  EXPECT_EQ(utf8_bytes("\x7f rest"), 1U);
  EXPECT_EQ(utf8_bytes("\xc2\x80"), 2U);
  EXPECT_EQ(utf8_bytes("\xdf\xbf rest"), 2U);
  EXPECT_EQ(utf8_bytes("\xe0\xa0\x80"), 3U);
  EXPECT_EQ(utf8_bytes("\xed\x9f\xbf"), 3U);
  EXPECT_EQ(utf8_bytes("\xee\x80\x80\xff"), 3U);
  EXPECT_EQ(utf8_bytes("\xf0\x90\x80\x80"), 4U);
  EXPECT_EQ(utf8_bytes("\xf4\x8f\xbf\xbf"), 4U);
}

TEST(Utf8, RefusesLongerFormsSurrogatesAndWhatIsBeyondUnicode) {
  for (const char* bad : {"\x80",
                          "\xbf",
                          "\xc0\x80",
                          "\xc0\x9b",
                          "\xc1\xbf",
                          "\xe0\x80\x80",
                          "\xe0\x9f\xbf",
                          "\xed\xa0\x80",
                          "\xed\xbf\xbf",
                          "\xf0\x80\x80\x80",
                          "\xf0\x8f\xbf\xbf",
                          "\xf4\x90\x80\x80",
                          "\xf5\x80\x80\x80",
                          "\xf7\xbf\xbf\xbf",
                          "\xf8\x88\x80\x80\x80",
                          "\xff",
                          "\xc3",
                          "\xe2\x82",
                          "\xf0\x90\x80",
                          "\xc3(",
                          "\xe2(\xa1",
                          "\xe2\x82("}) {
    EXPECT_EQ(utf8_bytes(bad), 0U) << bad;
    EXPECT_FALSE(is_utf8(std::string("a\xc3\xa4") + bad)) << bad;
  }
  EXPECT_TRUE(is_utf8("a\xc3\xa4\xf0\x9f\x98\x80"));
  EXPECT_TRUE(is_utf8(""));
}

}  // namespace
}  // namespace kiln
