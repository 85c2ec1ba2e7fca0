// The layouts that ImageDataset::open chooses from, and what they share.
#pragma once
#include <array>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/json.h"
#include "data/images/image_dataset.h"

namespace kiln::layouts {

// True for the extensions that torchvision's ImageFolder takes. Kiln cannot decode all of these formats: such
// files are listed too, and loading one throws an Error that names it.
bool has_image_extension(const std::string& file_name);

// A data set whose pictures are files below `root`.
class FileDataset : public ImageDataset {
 public:
  FileDataset(std::string root, const char* layout) : root_(std::move(root)), layout_(layout) {}
  const char* layout() const override { return layout_; }
  PictureBytes bytes(int64_t index) const override;
  std::vector<std::string> notes() const override;
  void set(std::vector<ImageRecord> records, std::vector<std::string> class_names,
           std::vector<std::string> notes);
  // Pictures that the list at `path` has no line for are noted.
  void set_list(const std::string& path) { list_path_ = path; }

 private:
  std::string root_, list_path_;
  const char* layout_;
};

// Collects labels, which are integers or names, and turns them into class indices at the end.
class LabelCollector {
 public:
  // `label` is a JSON integer or string. Throws Error naming `where` for anything else.
  void add(const nlohmann::json& label, const std::string& where);
  void add_none() { labels_.emplace_back(); }
  // Sets every record's label; returns the class names: the names sorted, or "0" ... for integers; empty when
  // there are no labels. Throws Error when only some records have one, or when integers and names are mixed.
  std::vector<std::string> finish(std::vector<ImageRecord>& records, const std::string& where) const;

 private:
  struct Label {
    int64_t index = -1;
    std::string name;
    bool is_set = false;
  };
  std::vector<Label> labels_;
};

// Counts files of picture formats that no layout takes.
class OtherPictures {
 public:
  void add(const std::string& path);                        // of any file
  void append_note(std::vector<std::string>& notes) const;  // if there are any

 private:
  std::map<std::string, int64_t> counts_;  // by extension
  std::string first_;
};

inline constexpr std::array<const char*, 3> kCaptionKeys = {"text", "caption", "captions"};

// Counts pictures whose JSON object has something like a caption where none is looked for.
class MissingCaptions {
 public:
  // `fields` gave no caption under any of `keys`.
  void add(const nlohmann::json& fields, const std::string& name, std::span<const char* const> keys);
  void append_note(int64_t num_pictures, std::vector<std::string>& notes) const;  // if there are any

 private:
  std::map<std::string, int64_t> found_;  // what is there instead
  std::string first_, keys_;
  int64_t count_ = 0;
};

// Reads the captions of a JSON object: text or caption, a string or a list of them, and captions, a list of
// strings or of objects with text and optionally weight and kind. Empty texts are left out. Throws Error
// naming `where`.
std::vector<Caption> captions_of(const nlohmann::json& fields, const std::string& where);
std::string without_trailing_space(std::string text);

std::unique_ptr<ImageDataset> open_class_folders(const std::string& root);
std::unique_ptr<ImageDataset> open_plain_folder(const std::string& root);
std::unique_ptr<ImageDataset> open_metadata(const std::string& root, const std::string& metadata_path);
// Opens PixArt's list of objects with prompt, sharegpt4v and path, which is relative to `root`.
std::unique_ptr<ImageDataset> open_data_info(const std::string& root, const std::string& list_path);
// Opens the tars, in this order, as one data set.
std::unique_ptr<ImageDataset> open_webdataset(const std::string& name,
                                              const std::vector<std::string>& tar_paths);

}  // namespace kiln::layouts
