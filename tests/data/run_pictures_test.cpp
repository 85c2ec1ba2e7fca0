// The pictures of a run: what is left out stays out, and what was read stays the same.
#include "data/images/run_pictures.h"

#include "data/test_images.h"

namespace kiln {
namespace {

using test::make_picture;
using test::message_of;
using test::TempFolder;
using testing::HasSubstr;

class PicturesOfARun : public testing::Test {
 protected:
  PicturesOfARun() {
    for (int64_t i = 0; i < 6; ++i)
      test::write_picture(path(i), make_picture(8 + i, 9, static_cast<uint32_t>(i)));
    test::write_bytes(path(1), "nothing");
    test::write_bytes(folder_ / "pictures/3.txt", "a red apple");
  }
  std::string path(int64_t i) const { return folder_ / ("pictures/" + std::to_string(i) + ".png"); }
  std::shared_ptr<RunPictures> open(const nlohmann::json& left_out = {}) const {
    return std::make_shared<RunPictures>(ImageDataset::open(folder_ / "pictures"),
                                         RunPictures::Options{.num_threads = 2, .left_out = left_out});
  }
  std::string data() const { return folder_ / "pictures"; }
  std::string record() const { return folder_ / "record.xxh3"; }

 private:
  TempFolder folder_;
};

TEST_F(PicturesOfARun, Friction24WhatHeadersShowIsLeftOut) {
  const auto pictures = open();
  EXPECT_EQ(pictures->records().size(), 5U);
  ASSERT_EQ(pictures->all_left_out().size(), 1U);
  EXPECT_EQ(pictures->all_left_out()[0].name, "1.png");
  EXPECT_THAT(pictures->all_left_out()[0].why, HasSubstr("1.png"));
  EXPECT_EQ(pictures->load(1).height, 10);
  const RunPictures large(ImageDataset::open(data()), {.least_side = 9});
  EXPECT_EQ(large.records().size(), 4U);
}

// Removed, repaired or as it was: a resumed run has the same list, and does not read what was left out.
TEST_F(PicturesOfARun, Friction24AResumedRunHasTheListThatItBeganWith) {
  const auto first = open();
  first->leave_out(2, "3.png ends in the middle");
  const nlohmann::json saved = nlohmann::json::parse(first->left_out().dump());
  const auto expect_same = [&] {
    const auto again = open(saved);
    EXPECT_EQ(again->identity(), first->identity());
    EXPECT_EQ(again->left_out(), saved);
    ASSERT_EQ(again->records().size(), 5U);
    EXPECT_EQ(again->records()[2].captions.at(0).text, "a red apple");
    EXPECT_EQ(again->header(2).height, 11);
    EXPECT_THROW(again->read(2), BrokenPicture);
    EXPECT_EQ(again->load(3).height, 12);
  };
  expect_same();
  test::write_picture(path(1), make_picture(8, 8));
  test::write_picture(path(3), make_picture(80, 80));
  expect_same();
  EXPECT_EQ(open()->records().size(), 6U) << "of a run that begins";
  for (const int64_t i : {1, 3}) std::filesystem::remove(path(i));
  std::filesystem::remove(data() + "/3.txt");
  expect_same();
  std::filesystem::remove(path(5));
  EXPECT_NE(open(saved)->identity(), first->identity());
}

TEST_F(PicturesOfARun, Friction24RanksTakeOverWhatOthersLeftOut) {
  const auto first = open(), other = open();
  first->leave_out(2, "broken");
  first->leave_out(2, "found again");
  other->leave_out(first->left_out());
  EXPECT_EQ(other->left_out(), first->left_out());
  EXPECT_THROW(other->read(2), BrokenPicture);
}

TEST_F(PicturesOfARun, HardeningHigh2AContentThatChangesIsNamed) {
  const std::string good = test::read_bytes(path(4));
  {
    const auto pictures = open();
    pictures->record_in(record(), /*is_new=*/true);
    for (const int64_t index : {0, 3}) pictures->read(index);  // 0.png and 4.png
  }
  std::string other = good;
  other[other.size() / 2] ^= 1;
  const auto resumed = [&] {
    auto pictures = open();
    pictures->record_in(record(), /*is_new=*/false);
    return pictures;
  };
  test::write_bytes(path(4), other);
  EXPECT_THAT(message_of([&] { resumed()->read(3); }), HasSubstr("4.png has changed since this run read it"));
  EXPECT_NO_THROW(resumed()->read(0));
  EXPECT_NO_THROW(resumed()->read(2)) << "was not read before";
  test::write_bytes(path(4), good);
  EXPECT_NO_THROW(resumed()->read(3));
  // Another size is another list.
  const std::string before = open()->identity();
  test::write_bytes(path(4), good + "x");
  EXPECT_NE(open()->identity(), before);
}

TEST_F(PicturesOfARun, HardeningHigh2ABrokenPictureMayBeRepairedBeforeItWasSaved) {
  const std::string good = test::read_bytes(path(4));
  test::write_bytes(path(4), good.substr(0, good.size() - 20) + std::string(20, '\0'));
  {
    const auto pictures = open();
    pictures->record_in(record(), /*is_new=*/true);
    EXPECT_THROW(pictures->load(3), BrokenPicture);
    pictures->leave_out(3, "broken");
  }
  test::write_bytes(path(4), good);
  const auto again = open();
  again->record_in(record(), /*is_new=*/false);
  EXPECT_EQ(again->load(3).height, 12);
}

}  // namespace
}  // namespace kiln
