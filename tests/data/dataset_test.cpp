#include "data/images/image_dataset.h"

#include <sys/stat.h>

#include <atomic>
#include <thread>

#include "data/images/ordered_workers.h"
#include "data/test_images.h"

namespace kiln {
namespace {

using test::make_picture, test::text_of, test::write_file, test::write_picture;

std::vector<std::string> names_of(const ImageDataset& dataset) {
  std::vector<std::string> names;
  for (const auto& record : dataset.records()) names.push_back(record.name);
  return names;
}

std::vector<int64_t> labels_of(const ImageDataset& dataset) {
  std::vector<int64_t> labels;
  for (const auto& record : dataset.records()) labels.push_back(record.label);
  return labels;
}

std::string png(uint32_t seed) { return text_of(encode_png(make_picture(8, 8, seed))); }

// Opening a FIFO to read waits for whoever writes to it.
TEST(ImageFolder, AFifoThatIsNamedAsAPictureIsRefused) {
  const TempFolder folder;
  ASSERT_EQ(::mkfifo((folder / "a.png").c_str(), 0600), 0);
  const auto dataset = ImageDataset::open(folder / "");
  EXPECT_ERROR(dataset->header(0), "expected a file");
}

TEST(ImageFolder, ClassesAndFilesInTorchvisionsOrder) {
  const TempFolder folder;
  // Folders sort as whole paths: "b/x-y" before "b/x/s"; upper case before lower case; nested folders
  // count.
  for (const char* name : {"b/x/s/1.png", "b/x/1.png", "b/x-y/1.png", "b/2.PNG", "b/10.png", "A/z.png",
                           "a.b/1.jpeg", "b/note.md"})
    write_picture(folder / name, make_picture(8, 8));
  const auto dataset = ImageDataset::open(folder / "");
  EXPECT_STREQ(dataset->layout(), "image_folder");
  EXPECT_THAT(dataset->class_names(), ElementsAre("A", "a.b", "b"));
  EXPECT_THAT(names_of(*dataset), ElementsAre("A/z.png", "a.b/1.jpeg", "b/10.png", "b/2.PNG", "b/x/1.png",
                                              "b/x-y/1.png", "b/x/s/1.png"));
  EXPECT_THAT(labels_of(*dataset), ElementsAre(0, 1, 2, 2, 2, 2, 2));
}

// Peers cut names at the first dot, so that these three were one sample.
TEST(ImageFolder, NamesKeepTheirDots) {
  const TempFolder folder;
  for (uint32_t i = 0; i < 3; ++i) {
    const std::string stem = "c/n01." + std::to_string(i) + ".v2";
    write_picture(folder / (stem + ".png"), make_picture(8, 8, i));
    write_file(folder / (stem + ".txt"), "caption " + std::to_string(i) + " \n");
  }
  write_file(folder / "c/n01.txt", "not this");
  const auto dataset = ImageDataset::open(folder / "");
  EXPECT_THAT(names_of(*dataset), ElementsAre("c/n01.0.v2.png", "c/n01.1.v2.png", "c/n01.2.v2.png"));
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(dataset->records()[i].captions.at(0).text, "caption " + std::to_string(i));
    EXPECT_EQ(dataset->load(i).rgb, make_picture(8, 8, static_cast<uint32_t>(i)).rgb);
  }
}

TEST(ImageFolder, RefusesWhatWouldLosePictures) {
  const TempFolder folder;
  write_picture(folder / "a/1.png", make_picture(8, 8));
  std::filesystem::create_directories(folder / "empty");
  EXPECT_ERROR(ImageDataset::open(folder / ""), "empty: remove the folder");
  std::filesystem::remove(folder / "empty");
  write_picture(folder / "1.png", make_picture(8, 8));
  EXPECT_ERROR(ImageDataset::open(folder / ""), "got both");
}

TEST(ImageDataset, SaysWhatItLookedFor) {
  const TempFolder folder;
  EXPECT_ERROR(ImageDataset::open(folder / "none"), "got nothing at");
  EXPECT_ERROR(ImageDataset::open(folder / ""),
               "expected class folders, images, metadata.jsonl, data_info.json or .tar files");
  write_file(folder / "x.zip", "PK");
  EXPECT_ERROR(ImageDataset::open(folder / "x.zip"), "unpack it first");
}

TEST(PlainFolder, HasCaptionsAndNoLabels) {
  const TempFolder folder;
  write_picture(folder / "b.png", make_picture(8, 8, 1));
  write_picture(folder / "a.png", make_picture(8, 8, 0));
  write_file(folder / "b.txt", "the second");
  const auto dataset = ImageDataset::open(folder / "");
  EXPECT_THAT(names_of(*dataset), ElementsAre("a.png", "b.png"));
  EXPECT_THAT(labels_of(*dataset), ElementsAre(-1, -1));
  EXPECT_TRUE(dataset->class_names().empty());
  EXPECT_EQ(dataset->records()[1].captions.at(0).text, "the second");
}

TEST(Metadata, NamesIntegersAndCaptions) {
  const TempFolder folder;
  write_picture(folder / "x/1.png", make_picture(8, 8, 3));
  write_file(folder / "metadata.jsonl",
             "{\"file_name\": \"x/1.png\", \"text\": \"one\", \"label\": \"dog\"}\n\n"
             "{\"file_name\": \"gone.png\", \"caption\": \"two\", \"label\": \"cat\"}\n");
  const auto dataset = ImageDataset::open(folder / "");
  EXPECT_STREQ(dataset->layout(), "metadata_jsonl");
  EXPECT_THAT(dataset->class_names(), ElementsAre("cat", "dog"));
  EXPECT_THAT(labels_of(*dataset), ElementsAre(1, 0));
  EXPECT_EQ(dataset->records()[0].captions.at(0).text, "one");
  EXPECT_EQ(dataset->records()[1].captions.at(0).text, "two");
  EXPECT_EQ(dataset->load(0).rgb, make_picture(8, 8, 3).rgb);
  EXPECT_ERROR(dataset->load(1), "gone.png");

  write_file(folder / "metadata.jsonl",
             "{\"file_name\": \"a.png\", \"label\": 2}\n{\"file_name\": \"b.png\", \"label\": 0}\n");
  const auto integers = ImageDataset::open(folder / "");
  EXPECT_THAT(integers->class_names(), ElementsAre("0", "1", "2"));
  EXPECT_THAT(labels_of(*integers), ElementsAre(2, 0));
}

TEST(Metadata, BadLinesAreNamed) {
  const TempFolder folder;
  const std::pair<const char*, const char*> cases[] = {
      {"{\"file_name\": \"a.png\"}\n{\"file\": \"b.png\"}\n", "metadata.jsonl, line 2"},
      {"not json\n", "expected a JSON object"},
      {"{\"file_name\": \"../secret.png\"}\n", "below the folder"},
      {"{\"file_name\": \"/etc/x.png\"}\n", "below the folder"},
      {"{\"file_name\": \"a.png\"}\n{\"file_name\": \"a.png\"}\n", "'a.png' again"},
      {"{\"file_name\": \"a.png\", \"label\": 1}\n{\"file_name\": \"b.png\"}\n", "b.png has none"},
      {"{\"file_name\": \"a.png\", \"label\": 1}\n{\"file_name\": \"b.png\", \"label\": \"x\"}\n",
       "got both"},
      {"{\"file_name\": \"a.png\", \"label\": -1}\n", "got -1"},
      {"{\"file_name\": \"a.png\", \"label\": 0.5}\n", "got 0.5"},
      {"", "got none in"}};
  for (const auto& [text, expected] : cases) {
    write_file(folder / "metadata.jsonl", text);
    EXPECT_ERROR(ImageDataset::open(folder / ""), expected) << text;
  }
}

TEST(WebDataset, SamplesFieldsAndRandomAccess) {
  const TempFolder folder;
  const std::string long_name = std::string(150, 'd') + "/n01";
  test::write_tar(folder / "00000.tar", {{"README", "hello"},
                                         {"a/0.png", png(0)},
                                         {"a/0.cls", "3"},
                                         {"a/0.txt", "zero\n"},
                                         {"a/1.json", "{\"caption\": \"one\", \"label\": 1}"},
                                         {"a/1.left.png", png(1)}});
  test::write_tar(folder / "00001.tar", {{long_name + ".png", png(2)}, {long_name + ".cls", "0"}});
  const auto dataset = ImageDataset::open(folder / "");
  EXPECT_STREQ(dataset->layout(), "webdataset");
  EXPECT_THAT(names_of(*dataset),
              ElementsAre("00000.tar/a/0.png", "00000.tar/a/1.left.png", "00001.tar/" + long_name + ".png"));
  EXPECT_THAT(labels_of(*dataset), ElementsAre(3, 1, 0));
  EXPECT_THAT(dataset->class_names(), ElementsAre("0", "1", "2", "3"));
  EXPECT_EQ(dataset->records()[0].captions.at(0).text, "zero");
  EXPECT_EQ(dataset->records()[1].captions.at(0).text, "one");
  for (const int64_t i : {2, 0, 1})
    EXPECT_EQ(dataset->load(i).rgb, make_picture(8, 8, static_cast<uint32_t>(i)).rgb) << i;
}

TEST(WebDataset, NothingIsLostInSilence) {
  const TempFolder folder;
  const auto error_of_tar = [&](const std::vector<std::pair<std::string, std::string>>& members) {
    test::write_tar(folder / "x.tar", members);
    return message_of([&] { ImageDataset::open(folder / "x.tar"); });
  };
  EXPECT_THAT(error_of_tar({{"n.1.png", png(0)}, {"n.2.png", png(1)}}), HasSubstr("n.1.png and n.2.png"));
  EXPECT_THAT(error_of_tar({{"a.png", png(0)}, {"b.png", png(1)}, {"a.txt", "late"}}),
              HasSubstr("'a' again"));
  EXPECT_THAT(error_of_tar({{"a.png", png(0)}, {"a.cls", "cat"}}), HasSubstr("expected an integer class"));
  EXPECT_THAT(error_of_tar({{"a.png", png(0)}, {"a.json", "[1]"}}), HasSubstr("expected a JSON object"));

  test::write_tar(folder / "x.tar", {{"a.txt", "no picture"}, {"b.png", png(1)}});
  const auto dataset = ImageDataset::open(folder / "x.tar");
  EXPECT_ERROR(dataset->load(0), "x.tar/a has no picture");
}

TEST(WebDataset, TruncatedAndCompressedTarsAreNamed) {
  const TempFolder folder;
  test::write_tar(folder / "x.tar", {{"a.png", png(0)}, {"b.png", png(1)}});
  const std::string whole = test::read_bytes(folder / "x.tar");
  write_file(folder / "x.tar", whole.substr(0, 1500));
  EXPECT_ERROR(ImageDataset::open(folder / "x.tar"), "x.tar");
  write_file(folder / "x.tar", "\x1f\x8b\x08 compressed");
  EXPECT_ERROR(ImageDataset::open(folder / "x.tar"), "uncompressed");
}

TEST(ImagePipeline, DeliversInOrderAndNamesTheBroken) {
  const TempFolder folder;
  constexpr int64_t kCount = 40;
  for (int64_t i = 0; i < kCount; ++i) {
    const std::string path = folder / fmt::format("{:03}.png", i);
    if (i % 10 == 3)
      write_file(path, "broken");
    else
      write_picture(path, make_picture(i % 10 == 7 ? 4 : 16, 20, static_cast<uint32_t>(i)));
  }
  const auto dataset = ImageDataset::open(folder / "");
  for (const int num_threads : {1, 4}) {
    const auto load = [&](int64_t i) { return load_cropped(*dataset, i, {.size = 8}); };
    ImagePipeline pipeline(2, kCount, load, num_threads, 6);
    PreparedImage prepared;
    for (int64_t i = 2; i < kCount; ++i) {
      ASSERT_TRUE(pipeline.next(prepared));
      EXPECT_EQ(prepared.index, i);
      if (i % 10 == 3) {
        EXPECT_THAT(prepared.error, HasSubstr("3.png"));
      } else if (i % 10 == 7) {
        EXPECT_THAT(prepared.error, HasSubstr("too small: 20 x 4, expected at least 8"));
      } else {
        EXPECT_EQ(prepared.error, "");
        EXPECT_EQ(prepared.image.rgb, center_crop(dataset->load(i), 8).rgb);
      }
    }
    EXPECT_FALSE(pipeline.next(prepared));
  }
}

TEST(ImagePipeline, EndsWhereAPictureCannotBeRead) {
  const auto load = [](int64_t) -> Image { fail("images", "cannot read 0.png: Input/output error"); };
  ImagePipeline pipeline(0, 4, load, 2);
  PreparedImage prepared;
  EXPECT_ERROR(pipeline.next(prepared), "cannot read 0.png: Input/output error");
}

TEST(ImagePipeline, StopsInTheMiddle) {
  const TempFolder folder;
  for (int i = 0; i < 20; ++i) write_picture(folder / fmt::format("{:03}.png", i), make_picture(16, 16));
  const auto dataset = ImageDataset::open(folder / "");
  ImagePipeline pipeline(
      0, 20, [&](int64_t i) { return load_cropped(*dataset, i, {.size = 8}); }, 3, 4);
  PreparedImage prepared;
  EXPECT_TRUE(pipeline.next(prepared));
}

TEST(MetadataJsonl, Friction23PicturesWithoutALineAreCountedOnceAlsoBesideALinkToTheFolder) {
  const TempFolder folder;
  for (const char* name : {"a.png", "b.png", "more/c.png"}) test::write_file(folder / name, png(1));
  test::write_file(folder / "metadata.jsonl", "{\"file_name\": \"a.png\"}\n");
  std::filesystem::create_directory_symlink(".", folder / "more/loop");
  std::filesystem::create_directory_symlink("..", folder / "more/up");
  EXPECT_THAT(ImageDataset::open(folder / "")->notes(),
              testing::ElementsAre(HasSubstr("2 of the 3 pictures")));
}

TEST(OrderedWorkers, KeepsOrderAndBoundAndRethrows) {
  std::atomic<int64_t> num_started = 0;
  int64_t num_taken = 0;
  OrderedWorkers<int64_t> workers(5, 105, 4, 8, [&](int64_t index) {
    ++num_started;
    if (index % 3 == 0) std::this_thread::yield();
    if (index == 50) throw std::runtime_error("fifty");
    return index * index;
  });
  for (int64_t index = 5; index < 105; ++index) {
    EXPECT_LE(num_started, num_taken + 8);
    if (index == 50) {
      EXPECT_THROW(workers.next(), std::runtime_error);
    } else {
      EXPECT_EQ(workers.next(), index * index);
    }
    ++num_taken;
  }
  EXPECT_EQ(workers.next(), std::nullopt);
}

}  // namespace
}  // namespace kiln
