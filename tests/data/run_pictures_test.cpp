// The pictures of a run: what is left out stays out, and what was read stays the same.
#include "data/images/run_pictures.h"

#include "data/test_images.h"

namespace kiln {
namespace {

using test::make_picture;

class PicturesOfARun : public testing::Test {
 protected:
  PicturesOfARun() {
    for (int64_t i = 0; i < 6; ++i)
      test::write_picture(path(i), make_picture(8 + i, 9, static_cast<uint32_t>(i)));
    test::write_bytes(path(1), "nothing");
    test::write_bytes(folder_ / "pictures/3.txt", "a red apple");
  }
  std::string path(int64_t i) const { return folder_ / ("pictures/" + std::to_string(i) + ".png"); }
  // Opens the pictures as a run that begins, or that knows these lines.
  std::shared_ptr<RunPictures> open(const nlohmann::json& left_out = nlohmann::json::array()) const {
    return std::make_shared<RunPictures>(ImageDataset::open(folder_ / "pictures"),
                                         RunPictures::Options{.num_threads = 2, .left_out = left_out});
  }
  // Opens them as a rank of the run in run(), which has begun.
  std::shared_ptr<RunPictures> resumed() const {
    auto pictures = open(lines());
    pictures->record_in(run(), 0, /*is_new=*/false);
    return pictures;
  }
  std::shared_ptr<RunPictures> begun() const {
    auto pictures = open();
    pictures->record_in(run(), 0, /*is_new=*/true);
    return pictures;
  }
  nlohmann::json lines() const { return read_left_out(list()); }
  std::string list() const { return folder_ / kLeftOutFile; }
  std::string data() const { return folder_ / "pictures"; }
  std::string run() const { return folder_ / ""; }

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

// Removed, repaired or as it was: a resumed run has the same list, and does not read what was left out. The
// list is on the disk at once, whatever the newest checkpoint knows.
TEST_F(PicturesOfARun, Friction24AResumedRunHasTheListThatItBeganWith) {
  const auto first = begun();
  first->leave_out(2, "3.png ends in the middle");
  const nlohmann::json saved = lines();
  const auto expect_same = [&] {
    const auto again = resumed();
    EXPECT_EQ(again->identity(), first->identity());
    EXPECT_EQ(lines(), saved);
    EXPECT_TRUE(again->had_left_out());
    ASSERT_EQ(again->records().size(), 5U);
    EXPECT_EQ(again->records()[2].captions.at(0).text, "a red apple");
    EXPECT_EQ(again->header(2).height, 11);
    EXPECT_THROW(again->read(2), BrokenPicture);
    EXPECT_EQ(again->load(3).height, 12);
  };
  EXPECT_FALSE(first->had_left_out());
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

TEST_F(PicturesOfARun, Friction24ANameThatIsNoUtf8IsLeftOutByTheRunThatResumes) {
  const std::string headless = data() + "/\xfe.png", cut = data() + "/\xff.png";
  test::write_bytes(headless, "nothing");
  test::write_picture(cut, make_picture(20, 20));
  const auto first = begun();
  ASSERT_EQ(first->records().size(), 6U);
  first->leave_out(5, "broken");
  ASSERT_EQ(lines().size(), 3U) << "both names read alike";
  for (const std::string& file : {headless, cut}) test::write_picture(file, make_picture(30, 30));
  EXPECT_EQ(resumed()->identity(), first->identity());
  for (const std::string& file : {headless, cut}) std::filesystem::remove(file);
  EXPECT_EQ(resumed()->identity(), first->identity());
  EXPECT_EQ(resumed()->records()[5].name, "\xff.png");
}

// One rank says it and writes it. The others hear of it from the files that they share.
TEST_F(PicturesOfARun, Friction24RanksTakeOverWhatOthersLeftOut) {
  const auto first = begun(), other = resumed(), third = resumed();
  first->leave_out(2, "broken");
  first->leave_out(2, "found again");
  other->leave_out(2, "broken");
  EXPECT_THROW(third->read(2), BrokenPicture);
  EXPECT_EQ(first->take_new_left_out().size(), 1U);
  EXPECT_TRUE(other->take_new_left_out().empty());
  EXPECT_EQ(lines().size(), 2U);
}

TEST_F(PicturesOfARun, Friction24TheListKnowsStagesAndDataSets) {
  const auto first = begun();
  first->leave_out(2, "broken");
  const RunPictures validation(ImageDataset::open(data()), {.left_out = lines(), .of = "--validation-data"});
  EXPECT_FALSE(validation.had_left_out());
  validation.record_in(run(), 0, /*is_new=*/true);
  EXPECT_EQ(validation.read(2), first->all().read(3)) << "it is whole, and of another set";
  EXPECT_EQ(lines().size(), 3U) << "1.png is left out of both";
  const std::string text = test::read_bytes(list());
  test::write_bytes(list(), text + "{\"picture\": \"torn");
  first->leave_out(3, "broken");
  EXPECT_EQ(lines().size(), 4U) << "behind a line that a full disk has cut";
  test::write_bytes(list(),
                    text + R"({"picture": "other", "why": "", "stage": 1e92})" + "\n{\"picture\": \"torn");
  prepare_left_out(list(), 8, /*begins=*/true);
  EXPECT_EQ(test::read_bytes(list()), text);
  prepare_left_out(list(), 0, /*begins=*/false);
  EXPECT_EQ(test::read_bytes(list()), text);
  prepare_left_out(list(), 0, /*begins=*/true);
  EXPECT_EQ(test::read_bytes(list()), "");
}

// Captions of a picture that was left out are those that the run began with.
TEST_F(PicturesOfARun, Friction24TextsOfABrokenPictureStayAlsoWithoutItsFile) {
  write_png(path(3), make_picture(11, 9), {{"Title", "red"}});
  const auto first = begun();
  first->leave_out(2, "broken");
  const PngTexts texts = {{"Title", "red"}};
  write_png(path(3), make_picture(11, 9), {{"Title", "blue"}});
  EXPECT_EQ(resumed()->png_texts(2), texts);
  std::filesystem::remove(path(3));
  EXPECT_EQ(resumed()->png_texts(2), texts);
}

// It is met again in each epoch, and its file may be large or far away.
TEST_F(PicturesOfARun, ABrokenPictureIsReadNoMoreForItsTexts) {
  class Counted : public ImageDataset {
   public:
    Counted(const std::string& path, int64_t& reads) : all_(ImageDataset::open(path)), reads_(reads) {
      records_ = all_->records();
    }
    const char* layout() const override { return all_->layout(); }
    PictureBytes bytes(int64_t index) const override {
      ++reads_;
      return all_->bytes(index);
    }

   private:
    const std::unique_ptr<ImageDataset> all_;
    int64_t& reads_;
  };
  int64_t reads = 0;
  const RunPictures pictures(std::make_unique<Counted>(data(), reads), {});
  pictures.leave_out(2, "broken");
  const int64_t reads_of_first = reads;
  for (int epoch = 0; epoch < 3; ++epoch) pictures.leave_out(2, "broken");
  EXPECT_EQ(reads, reads_of_first);
  EXPECT_EQ(pictures.take_new_left_out().size(), 1U);
}

// A file that cannot be read just now may be whole, and another rank may read it.
TEST_F(PicturesOfARun, Friction24OnlyBrokenAndMissingPicturesAreLeftOut) {
  class Unreadable : public ImageDataset {
   public:
    explicit Unreadable(const std::string& path) : all_(ImageDataset::open(path)) {
      records_ = all_->records();
    }
    const char* layout() const override { return all_->layout(); }
    PictureBytes bytes(int64_t index) const override {
      if (index == 4) fail("dataset", "cannot read 4.png: Input/output error");
      return all_->bytes(index);
    }

   private:
    const std::unique_ptr<ImageDataset> all_;
  };
  EXPECT_ERROR(RunPictures(std::make_unique<Unreadable>(data()), {}), "Input/output error");
  auto all = ImageDataset::open(data());
  std::filesystem::remove(path(5));
  EXPECT_EQ(RunPictures(std::move(all), {}).records().size(), 4U);
}

TEST_F(PicturesOfARun, HardeningHigh2AContentThatChangesIsNamed) {
  const std::string good = test::read_bytes(path(4));
  std::string other = good;
  other[other.size() / 2] ^= 1;
  const auto began = begun();
  const auto of_second_rank = resumed();
  for (const int64_t index : {0, 3}) began->read(index);  // 0.png and 4.png
  const auto has_changed = HasSubstr("4.png has changed since this run read it first");
  test::write_bytes(path(4), other);
  EXPECT_THAT(message_of([&] { resumed()->read(3); }), has_changed);
  EXPECT_THAT(message_of([&] { of_second_rank->read(3); }), has_changed) << "which had not read it";
  EXPECT_NO_THROW(resumed()->read(0));
  EXPECT_NO_THROW(resumed()->read(2)) << "was not read before";
  test::write_bytes(path(4), good);
  EXPECT_NO_THROW(resumed()->read(3));
  EXPECT_NO_THROW(of_second_rank->read(3));
  // Another size is another list.
  const std::string before = open()->identity();
  test::write_bytes(path(4), good + "x");
  EXPECT_NE(open()->identity(), before);
}

// Without the list, as after a full disk, a repaired file of the same size stays left out too.
TEST_F(PicturesOfARun, HardeningHigh2ABrokenPictureMayBeRepairedBeforeItWasSaved) {
  const std::string good = test::read_bytes(path(4));
  test::write_bytes(path(4), good.substr(0, good.size() - 20) + std::string(20, '\0'));
  {
    const auto pictures = begun();
    EXPECT_THROW(pictures->load(3), BrokenPicture);
    pictures->leave_out(3, "broken");
  }
  test::write_bytes(path(4), good);
  EXPECT_THROW(resumed()->load(3), BrokenPicture);
  std::filesystem::remove(list());
  EXPECT_THROW(resumed()->load(3), BrokenPicture);
  EXPECT_EQ(begun()->load(3).height, 12) << "a run that begins";
}

}  // namespace
}  // namespace kiln
