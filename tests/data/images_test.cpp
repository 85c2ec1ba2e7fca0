#include "data/images/images.h"

#include <algorithm>

#include "data/test_images.h"

namespace kiln {
namespace {

using test::decode, test::make_picture;

TEST(Images, PngRoundTrip) {
  const Image image = make_picture(13, 29);
  const Image back = decode(encode_png(image));
  EXPECT_EQ(back.height, 13);
  EXPECT_EQ(back.width, 29);
  EXPECT_EQ(back.rgb, image.rgb);
}

TEST(Images, LosslessWebpIsExactAndJpegClose) {
  const Image image = make_picture(40, 33);
  EXPECT_EQ(decode(test::encode_webp(image)).rgb, image.rgb);
  for (const bool progressive : {false, true}) {
    const Image jpeg = decode(test::encode_jpeg(image, progressive));
    ASSERT_EQ(jpeg.rgb.size(), image.rgb.size());
    double sum = 0;
    for (size_t i = 0; i < jpeg.rgb.size(); ++i) sum += std::abs(jpeg.rgb[i] - image.rgb[i]);
    EXPECT_LT(sum / static_cast<double>(jpeg.rgb.size()), 20);
  }
}

TEST(Images, EveryTruncationIsNamed) {
  const Image image = make_picture(20, 24);
  const std::vector<std::vector<uint8_t>> files = {test::encode_jpeg(image), test::encode_jpeg(image, true),
                                                   test::encode_webp(image)};
  for (const auto& file : files)
    for (size_t size = 0; size < file.size(); size += 7)
      EXPECT_ERROR(decode({file.data(), size}, "half.bin"), "half.bin");
  const auto png = encode_png(image);
  for (size_t size = 0; size + 24 < png.size(); size += 7)  // behind the pixels: checksums, end marker
    EXPECT_ERROR(decode({png.data(), size}, "half.png"), "half.png");
}

TEST(Images, CorruptPngDataIsRefused) {
  auto png = encode_png(make_picture(20, 24));
  png[png.size() / 2] ^= 0x40;
  EXPECT_ERROR(decode(png, "bad.png"), "cannot decode bad.png");
}

TEST(Images, OtherFilesAreNamed) {
  const std::string gif = "GIF89a and so on";
  EXPECT_ERROR(decode_image(std::as_bytes(std::span(gif)), "a.gif"), "expected a JPEG, PNG or WebP");
  EXPECT_ERROR(decode({}, "empty.jpg"), "empty.jpg: the file is empty");
  EXPECT_ERROR(read_image("/no/such.png"), "/no/such.png");
}

TEST(Images, HugeSizesAreRefusedBeforeAllocating) {
  auto png = encode_png(make_picture(4, 4));
  // IHDR: a width of 2^30, with the checksum of that header.
  const std::vector<uint8_t> header = {'I', 'H', 'D', 'R', 0x40, 0, 0, 0, 0, 0, 0, 4, 8, 2, 0, 0, 0};
  uint32_t crc = 0xFFFFFFFFu;
  for (const uint8_t byte : header) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ 0xEDB88320u : crc >> 1;
  }
  std::copy(header.begin(), header.end(), png.begin() + 12);
  for (int i = 0; i < 4; ++i) png[29 + i] = static_cast<uint8_t>(~crc >> (24 - 8 * i));
  EXPECT_ERROR(decode(png, "huge.png"), "got 1073741824 x 4");
}

TEST(Images, CenterCropTakesTheMiddle) {
  // A square in the middle of a wide white picture: after the crop only the square is left.
  Image image{64, 192, std::vector<uint8_t>(64 * 192 * 3, 255)};
  for (int64_t y = 0; y < 64; ++y) std::fill_n(image.rgb.begin() + (y * 192 + 64) * 3, 64 * 3, uint8_t{40});
  const Image crop = center_crop(image, 16);
  ASSERT_EQ(crop.height, 16);
  ASSERT_EQ(crop.width, 16);
  EXPECT_TRUE(std::all_of(crop.rgb.begin(), crop.rgb.end(), [](uint8_t v) { return v == 40; }));
}

TEST(Images, HalvingAveragesAndRoundsEachPass) {
  // Rows first: (1 + 2 + 1) / 2 = 2 and (4 + 4 + 1) / 2 = 4, then (2 + 4 + 1) / 2 = 3.
  Image image{2, 2, {}};
  for (const uint8_t value : {1, 2, 4, 4}) image.rgb.insert(image.rgb.end(), 3, value);
  EXPECT_EQ(center_crop(image, 1).rgb, (std::vector<uint8_t>{3, 3, 3}));
}

TEST(Images, ResizeToTheSameSizeIsACopy) {
  const Image image = make_picture(9, 7);
  EXPECT_EQ(resize_bicubic(image, 9, 7).rgb, image.rgb);
  EXPECT_EQ(center_crop(make_picture(8, 8), 8).rgb, make_picture(8, 8).rgb);
}

TEST(Images, GridPlacesTilesRowByRow) {
  std::vector<Image> tiles;
  for (uint8_t i = 0; i < 5; ++i) tiles.push_back({4, 6, std::vector<uint8_t>(4 * 6 * 3, i)});
  const Image grid = make_grid(tiles, 3);
  EXPECT_EQ(grid.height, 2 * 4 + 3 * 2);
  EXPECT_EQ(grid.width, 3 * 6 + 4 * 2);
  const auto at = [&](int64_t y, int64_t x) { return grid.rgb[(y * grid.width + x) * 3]; };
  EXPECT_EQ(at(2, 2), 0);
  EXPECT_EQ(at(2, 2 + 8), 1);
  EXPECT_EQ(at(2 + 6, 2 + 8), 4);
  EXPECT_EQ(at(0, 0), 255);
  EXPECT_EQ(at(2 + 6, 2 + 16), 255);  // no sixth tile
  EXPECT_ERROR(make_grid({}, 3), "expected images");
}

TEST(Images, WritePngLeavesNothingWhenItFails) {
  const test::TempFolder folder;
  EXPECT_ERROR(write_png(folder / "no/such/folder.png", make_picture(2, 2)), "folder.png");
  write_png(folder / "a.png", make_picture(2, 2));
  EXPECT_EQ(folder.num_files(), 1u);
  EXPECT_EQ(read_image(folder / "a.png").rgb, make_picture(2, 2).rgb);
}

}  // namespace
}  // namespace kiln
