#include "data/images/image_header.h"

#include <array>

#include "data/images/image_dataset.h"
#include "data/test_images.h"

namespace kiln {
namespace {

using test::make_picture;

// A TIFF header with a directory of two entries, the second the orientation.
std::string exif_of(int orientation, bool is_little) {
  const auto number = [&](int value, int num_bytes) {
    std::string text;
    for (int i = 0; i < num_bytes; ++i)
      text += static_cast<char>(value >> 8 * (is_little ? i : num_bytes - 1 - i) & 0xff);
    return text;
  };
  const auto short_entry = [&](int tag, int value) {
    return number(tag, 2) + number(3, 2) + number(1, 4) + number(value, 2) + std::string(2, '\0');
  };
  return (is_little ? "II" : "MM") + number(42, 2) + number(8, 4) + number(2, 2) + short_entry(0x0103, 6) +
         short_entry(0x0112, orientation) + number(0, 4);
}

std::string big_endian(size_t value, int num_bytes) {
  std::string text;
  for (int i = num_bytes - 1; i >= 0; --i) text += static_cast<char>(value >> 8 * i & 0xff);
  return text;
}

// Behind JPEG's first marker, PNG's header or pixels, or WebP's pixels.
std::string jpeg_with(const Image& image, const std::string& exif) {
  const std::string plain = test::text_of(test::encode_jpeg(image));
  const std::string body = std::string("Exif\0\0", 6) + exif;
  // A segment of another kind before it, longer than what is read at first.
  const std::string comment = "\xff\xfe" + big_endian(20002, 2) + std::string(20000, 'x');
  return plain.substr(0, 2) + comment + "\xff\xe1" + big_endian(body.size() + 2, 2) + body + plain.substr(2);
}
std::string png_with(const Image& image, const std::string& exif, bool is_behind) {
  const std::string plain = test::text_of(encode_png(image));
  const size_t at = is_behind ? plain.size() - 12 : 33;
  return plain.substr(0, at) + big_endian(exif.size(), 4) + "eXIf" + exif + "\0\0\0\0" + plain.substr(at);
}

ImageHeader header_of(const std::string& file) {
  return read_image_header(bytes_in_memory(std::as_bytes(std::span(file))), "test");
}

TEST(ImageHeader, HasTheSizeThatTheDecoderFinds) {
  for (const auto& [height, width] : {std::pair{1, 1}, {7, 300}, {301, 5}, {64, 48}}) {
    const Image image = make_picture(height, width);
    for (const std::string& file : {test::text_of(encode_png(image)), test::text_of(test::encode_jpeg(image)),
                                    test::text_of(test::encode_jpeg(image, /*progressive=*/true)),
                                    test::text_of(test::encode_webp(image))}) {
      const ImageHeader header = header_of(file);
      EXPECT_EQ(header.height, height);
      EXPECT_EQ(header.width, width);
      EXPECT_EQ(header.orientation, 1);
    }
  }
}

TEST(ImageHeader, NamesTheFormat) {
  const Image image = make_picture(40, 56);
  const auto format_of = [](const auto& bytes) {
    return choice_name(read_image_header(bytes_in_memory(std::as_bytes(std::span(bytes))), "test").format);
  };
  EXPECT_EQ(format_of(encode_png(image)), "PNG");
  EXPECT_EQ(format_of(codecs::encode_jpeg(image, 90)), "JPEG");
  EXPECT_EQ(format_of(codecs::encode_webp(image, 90)), "WebP");
}

// Chroma at half the resolution loses nothing of grey detail, nor of a single colour.
TEST(ImageHeader, LossyFilesShowThePictureTheyWereMadeOf) {
  Image grey = make_picture(40, 56), colour = grey;
  for (size_t i = 0; i < grey.rgb.size(); ++i) {
    grey.rgb[i] = grey.rgb[i - i % 3];
    colour.rgb[i] = std::array<uint8_t, 3>{200, 100, 50}[i % 3];
  }
  for (const auto encode : {+[](const Image& image) { return codecs::encode_jpeg(image, 100); },
                            +[](const Image& image) { return codecs::encode_webp(image, 100); }}) {
    const Image decoded_grey = decode_image(encode(grey), "test"),
                decoded_colour = decode_image(encode(colour), "test");
    ASSERT_EQ(decoded_grey.rgb.size(), grey.rgb.size());
    ASSERT_EQ(decoded_colour.rgb.size(), colour.rgb.size());
    double sum = 0;
    for (size_t i = 0; i < grey.rgb.size(); ++i) {
      sum += std::abs(decoded_grey.rgb[i] - grey.rgb[i]);
      // Rounding of the chroma times what turns it into blue: 1.8 in JPEG, 2 in WebP.
      EXPECT_NEAR(decoded_colour.rgb[i], colour.rgb[i], 2);
    }
    // Rounding of values, of frequencies and in WebP to 220 levels; a shift by a column differs by 21.
    EXPECT_LT(sum / static_cast<double>(grey.rgb.size()), 1);
  }
  EXPECT_LT(codecs::encode_jpeg(grey, 30).size(), codecs::encode_jpeg(grey, 95).size());
}

TEST(ImageHeader, AFormatHasALargestPicture) {
  const Image line{1, 70'000, std::vector<uint8_t>(size_t{3} * 70'000)};
  EXPECT_THAT([&] { codecs::encode_jpeg(line, 90); },
              testing::ThrowsMessage<codecs::DecodeError>(HasSubstr("65500 pixels")));
  EXPECT_THROW(codecs::encode_webp(line, 90), codecs::DecodeError);
}

TEST(ImageHeader, FindsTheOrientationInEveryFormat) {
  const Image image = make_picture(6, 10);
  for (int orientation = 1; orientation <= 8; ++orientation) {
    for (const bool is_little : {true, false}) {
      const std::string exif = exif_of(orientation, is_little);
      for (const std::string& file :
           {jpeg_with(image, exif), png_with(image, exif, false), png_with(image, exif, true)}) {
        const ImageHeader header = header_of(file);
        EXPECT_EQ(header.orientation, orientation);
        EXPECT_EQ(header.upright_height(), orientation < 5 ? 6 : 10);
        EXPECT_EQ(header.upright_width(), orientation < 5 ? 10 : 6);
      }
    }
  }
}

TEST(ImageHeader, ADamagedOrientationIsNone) {
  const Image image = make_picture(6, 10);
  for (const int orientation : {0, 9, 65535})
    EXPECT_EQ(header_of(jpeg_with(image, exif_of(orientation, true))).orientation, 1);
  const std::string whole = exif_of(6, false);
  for (size_t length = 0; length < whole.size() - 6; ++length)
    EXPECT_EQ(header_of(png_with(image, whole.substr(0, length), false)).orientation, 1) << length;
}

// Whatever is cut off: the header is as before, or the file is named. No byte behind its end is read.
TEST(ImageHeader, EveryTruncationIsReadOrNamed) {
  const Image image = make_picture(9, 17);
  const std::string exif = exif_of(6, true);
  for (const std::string& file : {jpeg_with(image, exif), png_with(image, exif, true),
                                  test::text_of(test::encode_webp(image)), std::string()}) {
    for (size_t length = 0; length < file.size(); length += length < 300 ? 1 : 61) {
      try {
        const ImageHeader header = header_of(file.substr(0, length));
        EXPECT_EQ(header.height, 9);
        EXPECT_EQ(header.width, 17);
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("cannot decode test"));
      }
    }
  }
  EXPECT_ERROR(header_of("GIF89a"), "expected a JPEG, PNG or WebP");
}

// Every orientation turns the picture that was stored that way back.
TEST(ImageHeader, UprightPicturesLookAllTheSame) {
  const Image image = make_picture(5, 8);
  const auto pixel = [](const Image& of, int64_t y, int64_t x) {
    return of.rgb.data() + (y * of.width + x) * 3;
  };
  for (int orientation = 1; orientation <= 8; ++orientation) {
    // Where EXIF says that the stored picture's row 0 and column 0 are seen.
    Image stored = orientation < 5 ? Image{5, 8, {}} : Image{8, 5, {}};
    stored.rgb.resize(image.rgb.size());
    for (int64_t row = 0; row < stored.height; ++row) {
      for (int64_t column = 0; column < stored.width; ++column) {
        int64_t y = orientation < 5 ? row : column, x = orientation < 5 ? column : row;
        if (orientation == 3 || orientation == 4 || orientation == 7 || orientation == 8) y = 4 - y;
        if (orientation == 2 || orientation == 3 || orientation == 6 || orientation == 7) x = 7 - x;
        std::copy_n(pixel(image, y, x), 3, stored.rgb.data() + (row * stored.width + column) * 3);
      }
    }
    const Image turned = upright(stored, orientation);
    EXPECT_EQ(turned.height, 5);
    EXPECT_EQ(turned.width, 8);
    EXPECT_EQ(turned.rgb, image.rgb) << orientation;
  }
}

TEST(ImageHeader, DataSetsReadItFromFoldersAndTars) {
  const test::TempFolder folder;
  const std::string turned = jpeg_with(make_picture(6, 10), exif_of(8, false));
  test::write_file(folder / "images/a.jpg", turned);
  test::write_tar(folder / "0.tar", {{"a.jpg", turned}, {"b.txt", "no picture"}});
  for (const std::string& path : {folder / "images", folder / "0.tar"}) {
    const auto dataset = ImageDataset::open(path);
    EXPECT_EQ(dataset->header(0).orientation, 8);
    EXPECT_EQ(dataset->load(0).height, 6);
    EXPECT_EQ(dataset->load(0, /*orient=*/true).height, 10);
    EXPECT_EQ(load_cropped(*dataset, 0, {.size = 6, .orient = true}).rgb,
              upright(load_cropped(*dataset, 0, {.size = 6, .orient = false}), 8).rgb);
  }
  EXPECT_ERROR(ImageDataset::open(folder / "0.tar")->header(1), "b has no picture");
}

}  // namespace
}  // namespace kiln
