// The list of pictures that an extraction left out: whole after every interruption.
#include "data/images/left_out_list.h"

#include "test_files.h"

namespace kiln {
namespace {

TEST(Friction25, TheListOfSkippedPicturesGoesOnAfterATornLine) {
  const TempFolder folder, whole;
  const std::vector<SkippedPicture> all = {{"a.png", "cannot decode a.png"},
                                           {"b\xff.png", "too small"},
                                           {"c.png", "a \"quoted\" reason\nof two lines"}};
  {
    SkippedPictures list(whole / "");
    for (const SkippedPicture& picture : all) list.add(picture);
  }
  const std::string text = test::read_bytes(whole / kLeftOutFile);
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    test::write_bytes(folder / kLeftOutFile, text.substr(0, cut));
    SkippedPictures list(folder / "");
    for (const SkippedPicture& picture : all) list.add(picture);
    ASSERT_EQ(test::read_bytes(folder / kLeftOutFile), text) << cut;
  }
  const std::vector<SkippedPicture> found = read_skipped(folder / "");
  ASSERT_EQ(found.size(), 3U);
  EXPECT_EQ(found[2].name, "c.png");
  EXPECT_EQ(found[2].why, all[2].why);
  EXPECT_TRUE(read_skipped("/nowhere").empty());
}

// Both read alike in JSON.
TEST(SkippedPictures, NamesThatAreNoUtf8HaveALineEach) {
  const TempFolder folder, joined;
  const std::vector<SkippedPicture> all = {{"\xfe.png", "broken"}, {"\xff.png", "broken"}};
  for (int run = 0; run < 2; ++run) {
    SkippedPictures list(folder / "");
    for (const SkippedPicture& picture : all) list.add(picture);
  }
  join_skipped(joined / "", {folder / ""});
  for (const std::string& where : {folder / "", joined / ""}) {
    const std::vector<SkippedPicture> found = read_skipped(where);
    ASSERT_EQ(found.size(), 2U);
    EXPECT_EQ(found[0].name, "\xfe.png");
    EXPECT_EQ(found[1].name, "\xff.png");
  }
}

TEST(SkippedPictures, ALineOfAnotherHandIsPassedOver) {
  const TempFolder folder;
  test::write_bytes(folder / kLeftOutFile,
                    "{\"picture\": \"a\", \"why\": \"b\", \"name_hex\": \"no\"}\n"
                    "{\"picture\": \"a\", \"why\": \"b\", \"name_hex\": 7}\n"
                    "{\"picture\": \"c\", \"why\": \"d\"}\n");
  const std::vector<SkippedPicture> found = read_skipped(folder / "");
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].name, "c");
}

}  // namespace
}  // namespace kiln
