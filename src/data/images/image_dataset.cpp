#include "data/images/image_dataset.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/files/xxh3.h"
#include "data/images/dataset_layouts.h"
#include "data/images/file_io.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

struct FolderContent {
  std::vector<std::string> tars;
  bool has_metadata = false, has_data_info = false, has_folders = false, has_images = false;
};

FolderContent look_into(const std::string& folder) {
  FolderContent content;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (entry.is_directory()) {
      content.has_folders = true;
    } else if (name == "metadata.jsonl") {
      content.has_metadata = true;
    } else if (name == "data_info.json") {
      content.has_data_info = true;
    } else if (name.ends_with(".tar")) {
      content.tars.push_back(entry.path());
    } else if (layouts::has_image_extension(name)) {
      content.has_images = true;
    }
  }
  std::sort(content.tars.begin(), content.tars.end());
  return content;
}

std::unique_ptr<ImageDataset> open_folder(const std::string& path) {
  const FolderContent content = look_into(path);
  if (content.has_metadata) return layouts::open_metadata(path, path + "/metadata.jsonl");
  if (content.has_data_info) return layouts::open_data_info(path, path + "/data_info.json");
  if (const std::string list = path + "/InternData/data_info.json"; fs::exists(list))
    return layouts::open_data_info(path + "/InternImgs", list);
  if (!content.tars.empty()) return layouts::open_webdataset(path, content.tars);
  if (content.has_images && content.has_folders)
    fail("dataset", "expected class folders or images, got both in {}: move the images or the folders away",
         path);
  if (content.has_folders) return layouts::open_class_folders(path);
  if (content.has_images) return layouts::open_plain_folder(path);
  fail("dataset",
       "expected class folders, images, metadata.jsonl, data_info.json or .tar files, got none of them in {}",
       path);
}

}  // namespace

std::unique_ptr<ImageDataset> ImageDataset::open(const std::string& path) {
  std::string trimmed = path;
  while (trimmed.size() > 1 && trimmed.ends_with('/')) trimmed.pop_back();
  std::unique_ptr<ImageDataset> dataset;
  try {
    if (!fs::exists(trimmed))
      fail("dataset", "expected a folder of images or a .tar, got nothing at {}", path);
    if (fs::is_directory(trimmed)) {
      dataset = open_folder(trimmed);
    } else if (trimmed.ends_with(".tar")) {
      dataset = layouts::open_webdataset(trimmed, {trimmed});
    } else {
      fail("dataset", "expected a folder of images or a .tar, got another file ({})", path);
    }
  } catch (const fs::filesystem_error& error) {
    fail("dataset", "cannot read {}: {}", path, error.code().message());
  }
  if (dataset->records().empty()) fail("dataset", "expected pictures, got none in {}", path);
  return dataset;
}

std::string dataset_fingerprint(const ImageDataset& dataset) {
  std::string text;
  for (const ImageRecord& record : dataset.records())
    text += fmt::format("{}\t{}\n", record.name, record.label);
  return xxh3_hex(std::as_bytes(std::span(text)));
}

Image load_cropped(const ImageDataset& dataset, int64_t index, const Crop& crop) {
  const Image image = dataset.load(index);
  if (!crop.enlarge && std::min(image.height, image.width) < crop.size)
    fail("dataset", "{} is too small: {} x {}, expected at least {} on the short side",
         dataset.records()[index].name, image.width, image.height, crop.size);
  return center_crop(image, crop.size);
}

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

std::vector<std::byte> FileDataset::read(int64_t index) const {
  return read_file("dataset", root_ + "/" + records_.at(index).name);
}

std::string without_trailing_space(std::string text) {
  const auto last = text.find_last_not_of(" \t\r\n");
  text.resize(last == std::string::npos ? 0 : last + 1);
  return text;
}

}  // namespace layouts
}  // namespace kiln
