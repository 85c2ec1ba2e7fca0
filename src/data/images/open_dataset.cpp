#include <algorithm>
#include <array>
#include <filesystem>

#include "core/error.h"
#include "core/files/entries.h"
#include "data/images/dataset_layouts.h"
#include "data/images/image_dataset.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

struct FolderContent {
  std::vector<std::string> tars;
  bool has_metadata = false, has_data_info = false, has_folders = false, has_images = false;
};

FolderContent look_into(const std::string& folder) {
  FolderContent content;
  for (const auto& entry : entries_of(folder)) {
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

bool is_archive(const std::string& path) {
  return std::ranges::any_of(
      std::to_array<const char*>({".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip", ".7z"}),
      [&](const char* ending) { return path.ends_with(ending); });
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
      fail("dataset", "expected a folder of images or a .tar that is not compressed, got the file {}{}", path,
           is_archive(trimmed) ? ": unpack it first" : "");
    }
  } catch (const fs::filesystem_error& error) {
    fail("dataset", "cannot read {}: {}", path, error.code().message());
  }
  if (dataset->records().empty()) fail("dataset", "expected pictures, got none in {}", path);
  return dataset;
}

}  // namespace kiln
