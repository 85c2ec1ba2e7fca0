// ImageFolder (each folder is a class) and plain folders of images; a .txt beside an image is its caption.
#include <algorithm>
#include <filesystem>
#include <unordered_set>

#include "core/error.h"
#include "core/files/entries.h"
#include "core/files/input_file.h"
#include "data/images/dataset_layouts.h"

namespace kiln::layouts {
namespace {

namespace fs = std::filesystem;

struct File {
  std::string folder, name;  // sorted by folder, then by name: torchvision's order
  auto operator<=>(const File&) const = default;
  std::string path() const { return folder + "/" + name; }
};

struct Listing {
  std::vector<File> images;
  std::unordered_set<std::string> captions;  // paths of the .txt files
};

void list_entry(const fs::directory_entry& entry, Listing& listing, OtherPictures& others) {
  const std::string name = entry.path().filename();
  if (entry.is_directory()) return;
  if (has_image_extension(name))
    listing.images.push_back({entry.path().parent_path(), name});
  else
    others.add(entry.path());
  if (name.ends_with(".txt")) listing.captions.insert(entry.path());
}

Listing list_tree(const std::string& folder, OtherPictures& others) {
  Listing listing;
  for (const auto& entry : entries_below(folder, fs::directory_options::follow_directory_symlink))
    list_entry(entry, listing, others);
  std::sort(listing.images.begin(), listing.images.end());
  return listing;
}

void append_records(const std::string& root, const Listing& listing, int64_t label,
                    std::vector<ImageRecord>& records) {
  for (const File& image : listing.images) {
    const std::string path = image.path();
    ImageRecord record{path.substr(root.size() + 1), label, {}};
    // Only the extension is replaced: "a.b.jpg" has its caption in "a.b.txt".
    const std::string caption = path.substr(0, path.rfind('.')) + ".txt";
    if (listing.captions.contains(caption)) {
      const auto bytes = read_file("dataset", caption);
      std::string text = without_trailing_space({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
      if (!text.empty()) record.captions = {{.text = std::move(text)}};
    }
    records.push_back(std::move(record));
  }
}

}  // namespace

std::unique_ptr<ImageDataset> open_class_folders(const std::string& root) {
  std::vector<std::string> classes;
  for (const auto& entry : entries_of(root))
    if (entry.is_directory()) classes.push_back(entry.path().filename());
  std::sort(classes.begin(), classes.end());
  std::vector<ImageRecord> records;
  OtherPictures others;
  for (size_t label = 0; label < classes.size(); ++label) {
    const Listing listing = list_tree(root + "/" + classes[label], others);
    if (listing.images.empty())
      fail("dataset", "expected images in every class folder, got none in {}/{}: remove the folder", root,
           classes[label]);
    append_records(root, listing, static_cast<int64_t>(label), records);
  }
  auto dataset = std::make_unique<FileDataset>(root, "image_folder");
  std::vector<std::string> notes;
  others.append_note(notes);
  dataset->set(std::move(records), std::move(classes), std::move(notes));
  return dataset;
}

std::unique_ptr<ImageDataset> open_plain_folder(const std::string& root) {
  Listing listing;
  OtherPictures others;
  for (const auto& entry : entries_of(root)) list_entry(entry, listing, others);
  std::sort(listing.images.begin(), listing.images.end());
  std::vector<ImageRecord> records;
  append_records(root, listing, -1, records);
  auto dataset = std::make_unique<FileDataset>(root, "images");
  std::vector<std::string> notes;
  others.append_note(notes);
  dataset->set(std::move(records), {}, std::move(notes));
  return dataset;
}

}  // namespace kiln::layouts
