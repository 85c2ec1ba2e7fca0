#include "core/text/split.h"

#include "test_files.h"

namespace kiln {
namespace {

TEST(Split, KeepsEmptyPartsAndDropsSpaces) {
  EXPECT_THAT(split("a, b,,c d", ','), ElementsAre("a", "b", "", "cd"));
  EXPECT_THAT(split("", ','), ElementsAre(""));
}

TEST(Split, FindsWordsBetweenSpacesAndLineBreaks) {
  EXPECT_THAT(words_in(" one  two\nthree "), ElementsAre("one", "two", "three"));
  EXPECT_TRUE(words_in("").empty());
}

}  // namespace
}  // namespace kiln
