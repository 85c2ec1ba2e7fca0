#include "data/images/npz.h"

#include <cstring>

#include "data/test_images.h"

namespace kiln {
namespace {

using test::make_picture;

std::string npy(const std::string& dict, const std::string& data, char version = 1) {
  std::string file = std::string("\x93NUMPY") + version + '\0';
  file += static_cast<char>(dict.size());
  file += '\0';
  if (version > 1) file += std::string(2, '\0');
  return file + dict + data;
}

NpyArray parse(const std::string& file) { return parse_npy(std::as_bytes(std::span(file)), "x.npy"); }

TEST(Npy, ReadsShapesAndTypes) {
  const auto floats = parse(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), }\n", "abcdefgh"));
  EXPECT_EQ(floats.dtype, Dtype::kF32);
  EXPECT_THAT(floats.shape, ElementsAre(1, 2));
  EXPECT_EQ(std::memcmp(floats.bytes.data(), "abcdefgh", 8), 0);
  const auto scalar = parse(npy("{'descr': '<i8', 'fortran_order': False, 'shape': (), }", "12345678", 2));
  EXPECT_EQ(scalar.dtype, Dtype::kI64);
  EXPECT_TRUE(scalar.shape.empty());
  // A vector is in both orders.
  EXPECT_THAT(parse(npy("{'descr': '|u1', 'fortran_order': True, 'shape': (3,), }", "abc")).shape,
              ElementsAre(3));
}

TEST(Npy, BadFilesAreNamed) {
  const std::string good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
  const std::pair<std::string, const char*> cases[] = {
      {"PK\x03\x04 and more bytes", "expected a .npy array"},
      {npy(good, "abc"), "expected 8 bytes of data, got 3"},
      {npy(good, "abcdefghi"), "expected 8 bytes of data, got 9"},
      {npy(good, "").substr(0, 30), "truncated"},
      {npy(good, "abcdefgh", 9), "format version"},
      {npy("{'descr': '>f4', 'fortran_order': False, 'shape': (2,), }", "abcdefgh"), "little-endian"},
      {npy("{'descr': '|O', 'fortran_order': False, 'shape': (2,), }", "abcdefgh"), "'|O'"},
      {npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }", "abcdefgh"),
       "plain element type"},
      {npy("{'descr': '<f4', 'fortran_order': True, 'shape': (1, 2), }", "abcdefgh"), "Fortran order"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2x,), }", "abcdefgh"), "malformed"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-2,), }", "abcdefgh"), "malformed"},
      {npy("{'descr': '<f4', 'fortran_order': False}", "abcdefgh"), "malformed"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387905, 4), }", "abcdefgh"),
       "too large"}};
  for (const auto& [file, expected] : cases)
    EXPECT_THAT(message_of([&bytes = file] { parse(bytes); }), has_all(expected, "x.npy")) << file;
}

void add_images(NpzImageWriter& writer, int64_t end) {
  for (int64_t i = writer.num_written(); i < end; ++i)
    writer.add(make_picture(3, 4, static_cast<uint32_t>(i)));
}

// Of five images of 3 x 4.
std::unique_ptr<NpzImageWriter> open_images(const std::string& path, const std::string& settings = "seed 1") {
  return NpzImageWriter::open(path, 5, 3, 4, settings);
}

TEST(NpzImageWriter, AnInterruptedFileIsContinuedToTheSameBytes) {
  const TempFolder folder;
  {
    const auto writer = open_images(folder / "whole.npz");
    add_images(*writer, 5);
    writer->finish();
  }
  {
    const auto writer = open_images(folder / "cut.npz");
    add_images(*writer, 3);
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "cut.npz"));
  // Killed within the third image.
  std::filesystem::resize_file(folder / "cut.npz.partial",
                               std::filesystem::file_size(folder / "cut.npz.partial") - 7);
  const auto writer = open_images(folder / "cut.npz");
  EXPECT_EQ(writer->num_written(), 2);
  EXPECT_ERROR(writer->finish(), "expected 5 images, got 2");
  add_images(*writer, 5);
  EXPECT_ERROR(writer->add(make_picture(3, 4)), "one more");
  writer->finish();
  EXPECT_EQ(read_bytes(folder / "cut.npz"), read_bytes(folder / "whole.npz"));
  EXPECT_EQ(folder.num_files(), 2u);
  // A third run finds it done.
  const auto again = open_images(folder / "cut.npz");
  EXPECT_EQ(again->num_written(), 5);
  again->finish();
  EXPECT_EQ(read_bytes(folder / "cut.npz"), read_bytes(folder / "whole.npz"));
}

TEST(NpzImageWriter, RefusesOtherImagesAndBadPlaces) {
  const TempFolder folder;
  {
    const auto writer = open_images(folder / "a.npz");
    EXPECT_ERROR(writer->add(make_picture(4, 3)), "expected images of 4 x 3, got 3 x 4");
    add_images(*writer, 1);
  }
  EXPECT_ERROR(NpzImageWriter::open(folder / "a.npz", 6, 3, 4, "seed 1"),
               "holds other images than 6 of 4 x 3");
  EXPECT_ERROR(open_images(folder / "a.npz", "seed 2"), "other settings", "a.npz.partial");
  {
    const auto writer = open_images(folder / "a.npz");
    EXPECT_EQ(writer->num_written(), 1);  // the refusals left it alone
    add_images(*writer, 5);
    writer->finish();
  }
  const std::string whole = read_bytes(folder / "a.npz");
  EXPECT_ERROR(open_images(folder / "a.npz", "seed 2"), "other settings", "a.npz");
  EXPECT_EQ(read_bytes(folder / "a.npz"), whole);
  write_bytes(folder / "b.npz", "something else");
  EXPECT_ERROR(open_images(folder / "b.npz"), "got another");
  EXPECT_EQ(read_bytes(folder / "b.npz"), "something else");
  EXPECT_ERROR(open_images(folder / "no/a.npz"), "no/a.npz");
  EXPECT_ERROR(NpzImageWriter::open(folder / "c.npz", 0, 3, 4, "seed 1"), "expected images");
}

}  // namespace
}  // namespace kiln
