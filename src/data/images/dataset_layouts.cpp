#include "data/images/dataset_layouts.h"

#include <algorithm>

#include "data/images/file_io.h"

namespace kiln {
namespace layouts {

bool has_image_extension(const std::string& file_name) {
  std::string lower = file_name;
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  constexpr std::string_view kExtensions[] = {".jpg", ".jpeg", ".png",  ".ppm", ".bmp",
                                              ".pgm", ".tif",  ".tiff", ".webp"};
  return std::any_of(std::begin(kExtensions), std::end(kExtensions),
                     [&](std::string_view extension) { return lower.ends_with(extension); });
}

Image FileDataset::load(int64_t index) const { return read_image(root_ + "/" + records_.at(index).name); }

void FileDataset::set(std::vector<ImageRecord> records, std::vector<std::string> class_names) {
  records_ = std::move(records);
  class_names_ = std::move(class_names);
}

PictureBytes FileDataset::bytes(int64_t index) const {
  const auto file =
      std::make_shared<const RandomAccessFile>("dataset", root_ + "/" + records_.at(index).name);
  return {.size = file->size(),
          .read = [file](int64_t offset, int64_t count) { return file->read(offset, count); }};
}

std::string without_trailing_space(std::string text) {
  const auto last = text.find_last_not_of(" \t\r\n");
  text.resize(last == std::string::npos ? 0 : last + 1);
  return text;
}

}  // namespace layouts
}  // namespace kiln
