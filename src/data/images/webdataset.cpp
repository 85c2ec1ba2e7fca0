// WebDataset: files of a tar whose names are equal up to the first dot of the base name are one sample. The
// tars are read once for an index of offsets; after that every picture is one read.
#include <archive.h>
#include <archive_entry.h>

#include <filesystem>
#include <unordered_set>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/text/json_text.h"
#include "data/images/dataset_layouts.h"

namespace kiln::layouts {
namespace {

constexpr int64_t kMaxFieldBytes = 16 << 20;  // of a caption, class or JSON

struct TarEntry {
  std::string path, key, extension;
  int64_t offset = 0, size = 0;
};

// Splits "dir/n01.left.jpg" into key "dir/n01" and extension "left.jpg". Returns false for a name without a
// dot.
bool split_name(TarEntry& entry) {
  const auto slash = entry.path.rfind('/');
  const auto base = slash == std::string::npos ? 0 : slash + 1;
  const auto dot = entry.path.find('.', base);
  if (dot == std::string::npos || dot == base) return false;
  entry.key = entry.path.substr(0, dot);
  entry.extension = entry.path.substr(dot + 1);
  return true;
}

class TarReader {
 public:
  explicit TarReader(const RandomAccessFile& file)
      : path_(file.path()), archive_(archive_read_new(), archive_read_free) {
    archive_read_support_format_tar(archive_.get());
    if (archive_read_open_fd(archive_.get(), file.fd(), 1 << 16) != ARCHIVE_OK) fail_reading();
  }

  // Moves to the next regular file. Returns false at the end.
  bool next(TarEntry& out) {
    for (;;) {
      archive_entry* entry = nullptr;
      const int status = archive_read_next_header(archive_.get(), &entry);
      if (status == ARCHIVE_EOF) return false;
      if (status != ARCHIVE_OK && status != ARCHIVE_WARN) fail_reading();
      if (archive_entry_filetype(entry) != AE_IFREG || archive_entry_hardlink(entry)) continue;
      const char* name = archive_entry_pathname_utf8(entry);
      if (!name) name = archive_entry_pathname(entry);
      if (!name) fail("webdataset", "expected file names in UTF-8 ({})", path_);
      // The header has been read, so the data begin at the current position.
      out = {name, {}, {}, archive_filter_bytes(archive_.get(), 0), archive_entry_size(entry)};
      return true;
    }
  }

 private:
  [[noreturn]] void fail_reading() const {
    const char* reason = archive_error_string(archive_.get());
    fail("webdataset", "cannot read {}: {} (expected an uncompressed, complete tar)", path_,
         reason ? reason : "unknown error");
  }

  std::string path_;
  std::unique_ptr<archive, decltype(&archive_read_free)> archive_;
};

// The fields of one sample, in the order of the tar.
struct Sample {
  std::string key;
  std::vector<TarEntry> fields;
};

class WebDataset : public ImageDataset {
 public:
  explicit WebDataset(std::string name) : name_(std::move(name)) {}
  const char* layout() const override { return "webdataset"; }

  void add_tar(const std::string& path) {
    tars_.push_back(std::make_unique<RandomAccessFile>("webdataset", path));
    TarReader reader(*tars_.back());
    Sample sample;
    for (TarEntry entry; reader.next(entry);) {
      if (!split_name(entry)) continue;  // README and the like belong to no sample
      if (entry.key != sample.key) {
        finish_sample(sample);
        sample = {entry.key, {}};
      }
      sample.fields.push_back(std::move(entry));
    }
    finish_sample(sample);
  }

  void finish() {
    class_names_ = labels_.finish(records_, name_);
    missing_.append_note(std::ssize(records_), notes_);
  }

  PictureBytes bytes(int64_t index) const override {
    const Picture& picture = pictures_.at(index);
    if (picture.size < 0)
      fail("webdataset", "{} has no picture (expected a field jpg, jpeg, png or webp)", records_[index].name);
    return {.size = picture.size,
            .read = [&tar = *tars_[picture.tar], begin = picture.offset](int64_t offset, int64_t count) {
              return tar.read(begin + offset, count);
            }};
  }

 private:
  struct Picture {
    size_t tar;
    int64_t offset, size;  // size -1: none
  };

  std::string read_text(const TarEntry& entry) const {
    if (entry.size > kMaxFieldBytes)
      fail("webdataset", "expected a text of at most {} MiB, got {} bytes ({} of {})", kMaxFieldBytes >> 20,
           entry.size, entry.path, tars_.back()->path());
    const auto bytes = tars_.back()->read(entry.offset, entry.size);
    return without_trailing_space({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }

  // Prefers a field called jpg, jpeg, png or webp to one that only ends so ("left.jpg"). Throws Error if two
  // are equally good, because one picture would be lost.
  const TarEntry* find_picture(const Sample& sample, const std::string& where) const {
    const TarEntry* found = nullptr;
    for (const bool exact : {true, false}) {
      for (const TarEntry& field : sample.fields) {
        const bool is_picture = has_image_extension("." + field.extension) &&
                                (!exact || field.extension.find('.') == std::string::npos);
        if (!is_picture) continue;
        if (found)
          fail("webdataset",
               "expected one picture per sample, got {} and {}, which are one sample by their names up to "
               "the first dot ({})",
               found->path, field.path, where);
        found = &field;
      }
      if (found) return found;
    }
    return nullptr;
  }

  void finish_sample(const Sample& sample) {
    if (sample.fields.empty()) return;
    const std::string& tar_path = tars_.back()->path();
    const TarEntry* picture = find_picture(sample, tar_path);
    const std::string tar_name = std::filesystem::path(tar_path).filename();
    ImageRecord record{tar_name + "/" + (picture ? picture->path : sample.key), -1, {}};
    if (!names_.insert(tar_name + "/" + sample.key).second)
      fail("webdataset", "expected each sample once and in one piece, got '{}' again ({})", sample.key,
           tar_path);
    read_fields(sample, record);
    pictures_.push_back(picture ? Picture{tars_.size() - 1, picture->offset, picture->size}
                                : Picture{tars_.size() - 1, 0, -1});
    records_.push_back(std::move(record));
  }

  // Fields .cls and .txt override those of the JSON.
  void read_fields(const Sample& sample, ImageRecord& record) {
    nlohmann::json label, json;
    for (const TarEntry& field : sample.fields) {
      const std::string where = field.path + " of " + tars_.back()->path();
      if (field.extension == "cls") {
        label = json_or_discarded("webdataset", read_text(field), where);
        if (!is_integer(label)) fail("webdataset", "expected an integer class ({})", where);
      } else if (field.extension == "txt") {
        if (std::string text = read_text(field); !text.empty()) record.captions = {{.text = std::move(text)}};
      } else if (field.extension == "json") {
        json = json_or_discarded("webdataset", read_text(field), where);
        if (!json.is_object()) fail("webdataset", "expected a JSON object ({})", where);
      }
    }
    if (json.is_object() && record.captions.empty()) {
      record.captions = captions_of(json, record.name);
      if (record.captions.empty()) missing_.add(json, record.name, kCaptionKeys);
    }
    for (const char* key : {"label", "cls"})
      if (json.is_object() && label.is_null() && json.contains(key)) label = json[key];
    if (label.is_null())
      labels_.add_none();
    else
      labels_.add(label, record.name);
  }

  std::string name_;
  std::vector<std::unique_ptr<RandomAccessFile>> tars_;
  std::vector<Picture> pictures_;
  std::unordered_set<std::string> names_;
  LabelCollector labels_;
  MissingCaptions missing_;
};

}  // namespace

std::unique_ptr<ImageDataset> open_webdataset(const std::string& name,
                                              const std::vector<std::string>& tar_paths) {
  auto dataset = std::make_unique<WebDataset>(name);
  for (const std::string& path : tar_paths) dataset->add_tar(path);
  dataset->finish();
  return dataset;
}

}  // namespace kiln::layouts
