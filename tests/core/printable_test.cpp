#include "core/text/printable.h"

#include <gtest/gtest.h>

namespace kiln {
namespace {

TEST(Printable, Finding3NothingThatATerminalObeys) {
  EXPECT_EQ(printable("a \"plain\" \\ line, \u00e4\u4e2d\U0001f600"),
            "a \"plain\" \\ line, \u00e4\u4e2d\U0001f600");
  EXPECT_EQ(printable("\x1b[2J\x1b]52;c;aGk=\x07\r\n\x7f"), "\\x1b[2J\\x1b]52;c;aGk=\\x07\\x0d\\x0a\\x7f");
  EXPECT_EQ(printable("\xc2\x9b"
                      "2J"),
            "\\xc2\\x9b2J");
  EXPECT_EQ(printable("\x9b \xc3 \xf8\x80\x80\x80\x80"), "\\x9b \\xc3 \\xf8\\x80\\x80\\x80\\x80");
  EXPECT_EQ(printable("\xe4\xb8"), "\\xe4\\xb8");
}

// A lenient terminal reads a longer form of Escape as Escape.
TEST(Printable, LongerFormsSurrogatesAndWhatIsBeyondUnicodeAreNoCharacters) {
  EXPECT_EQ(printable("\xc0\x9b[2J"), "\\xc0\\x9b[2J");
  EXPECT_EQ(printable("\xe0\x80\x9b"), "\\xe0\\x80\\x9b");
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");
  EXPECT_EQ(printable("\xf5\x80\x80\x80"), "\\xf5\\x80\\x80\\x80");
}

TEST(Printable, Finding13KeepsTheLineEndsOfOurOwnMessages) {
  EXPECT_EQ(printable("a file \x1b[2J:\n  remove it\r", "\n"), "a file \\x1b[2J:\n  remove it\\x0d");
}

// "safetensors.exe" could be shown as "exe.srotcet".
TEST(Printable, Finding13NothingTurnsTheDirectionOfText) {
  EXPECT_EQ(printable("a\u202eb\u2066c\u200fd\u061ce"),
            "a\\xe2\\x80\\xaeb\\xe2\\x81\\xa6c\\xe2\\x80\\x8fd\\xd8\\x9ce");
  EXPECT_EQ(printable("\u2013 \u2028 \u2070"), "\u2013 \u2028 \u2070");
}

}  // namespace
}  // namespace kiln
