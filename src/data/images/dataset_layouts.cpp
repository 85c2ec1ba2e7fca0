#include "data/images/dataset_layouts.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <unordered_set>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/text/json_text.h"
#include "core/text/some_of.h"
#include "core/text/utf8.h"

namespace kiln::layouts {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxClasses = 1 << 20;

Caption caption_of(const nlohmann::json& value, const std::string& where) {
  if (value.is_string()) return {.text = value.get<std::string>()};
  const auto text = value.is_object() ? value.find("text") : value.end();
  if (!value.is_object() || text == value.end() || !text->is_string())
    fail("dataset", "expected a caption or an object with its text, got {} ({})", brief(value), where);
  Caption caption{.text = text->get<std::string>()};
  if (const auto weight = value.find("weight"); weight != value.end()) {
    if (!weight->is_number() || weight->get<double>() < 0)
      fail("dataset", "expected a weight of at least 0, got {} ({})", brief(*weight), where);
    caption.weight = weight->get<float>();
  }
  if (const auto kind = value.find("kind"); kind != value.end()) {
    if (!kind->is_string()) fail("dataset", "expected a kind, got {} ({})", brief(*kind), where);
    caption.kind = kind->get<std::string>();
  }
  return caption;
}

// Returns notes about the files below `root` that `records` does not list, although they are pictures. Links
// to folders are not followed. A folder that cannot be read costs the notes, no more.
std::vector<std::string> unlisted_notes(const std::string& root, const std::string& list_path,
                                        const std::vector<ImageRecord>& records) {
  std::unordered_set<std::string> listed;
  for (const ImageRecord& record : records) listed.insert(fs::path(record.name).lexically_normal());
  OtherPictures others;
  std::string first;
  int64_t num_pictures = 0, num_unlisted = 0;
  std::error_code error;
  fs::recursive_directory_iterator entry(root, fs::directory_options::skip_permission_denied, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    const std::string path = entry->path(), name = path.substr(root.size() + 1);
    const bool is_listed = listed.contains(name);
    if (!has_image_extension(path)) {
      if (!is_listed) others.add(path);
      continue;
    }
    ++num_pictures;
    if (is_listed) continue;
    if (num_unlisted++ == 0 || name < first) first = name;
  }
  if (error) return {};
  std::vector<std::string> notes;
  if (num_unlisted > 0)
    notes.push_back(
        fmt::format("{} of the {} pictures in {} have no line in {} and are left out, the first: {}",
                    num_unlisted, num_pictures, root, fs::path(list_path).filename().string(), first));
  others.append_note(notes);
  return notes;
}

}  // namespace

std::string lower_case(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

bool has_image_extension(const std::string& file_name) {
  const std::string lower = lower_case(file_name);
  constexpr std::string_view kExtensions[] = {".jpg", ".jpeg", ".png",  ".ppm", ".bmp",
                                              ".pgm", ".tif",  ".tiff", ".webp"};
  return std::any_of(std::begin(kExtensions), std::end(kExtensions),
                     [&](std::string_view extension) { return lower.ends_with(extension); });
}

void FileDataset::set(std::vector<ImageRecord> records, std::vector<std::string> class_names,
                      std::vector<std::string> notes) {
  records_ = std::move(records);
  class_names_ = std::move(class_names);
  notes_ = std::move(notes);
}

std::vector<std::string> FileDataset::notes() const {
  if (list_path_.empty()) return notes_;
  std::vector<std::string> all = unlisted_notes(root_, list_path_, records_);
  all.insert(all.end(), notes_.begin(), notes_.end());
  return all;
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

void LabelCollector::add(const nlohmann::json& label, const std::string& where) {
  if (label.is_string()) {
    labels_.push_back({-1, label.get<std::string>(), true});
    return;
  }
  if (!is_integer(label))
    fail("dataset", "expected a class as an integer or a name, got {} ({})", brief(label), where);
  const auto index = label.get<int64_t>();
  if (index < 0 || index >= kMaxClasses)
    fail("dataset", "expected a class from 0 to {}, got {} ({})", kMaxClasses - 1, label.dump(), where);
  labels_.push_back({index, {}, true});
}

std::vector<std::string> LabelCollector::finish(std::vector<ImageRecord>& records,
                                                const std::string& where) const {
  std::vector<std::string> names;
  int64_t num_set = 0, num_integers = 0, num_classes = 0;
  for (const Label& label : labels_) {
    num_set += label.is_set;
    if (label.is_set && label.index >= 0) ++num_integers;
    num_classes = std::max(num_classes, label.index + 1);
    if (label.is_set && label.index < 0) names.push_back(label.name);
  }
  if (num_set == 0) return {};
  if (num_set != static_cast<int64_t>(labels_.size())) {
    const auto missing =
        std::find_if(labels_.begin(), labels_.end(), [](const Label& label) { return !label.is_set; });
    fail("dataset", "expected a class for every picture or for none, got {} of {}: {} has none ({})", num_set,
         labels_.size(), records[missing - labels_.begin()].name, where);
  }
  if (num_integers != 0 && !names.empty())
    fail("dataset", "expected classes as integers or as names, got both ({})", where);
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  for (size_t i = 0; i < labels_.size(); ++i) {
    const auto& label = labels_[i];
    records[i].label = label.index >= 0
                           ? label.index
                           : std::lower_bound(names.begin(), names.end(), label.name) - names.begin();
  }
  for (int64_t i = 0; i < num_classes; ++i) names.push_back(std::to_string(i));
  return names;
}

void OtherPictures::add(const std::string& path) {
  constexpr std::string_view kExtensions[] = {".gif", ".avif", ".heic", ".heif", ".jxl", ".jfif", ".jp2"};
  const std::string extension = lower_case(std::filesystem::path(path).extension());
  if (std::ranges::find(kExtensions, extension) == std::end(kExtensions)) return;
  ++counts_[extension];
  if (first_.empty() || path < first_) first_ = path;
}

void OtherPictures::append_note(std::vector<std::string>& notes) const {
  if (counts_.empty()) return;
  std::string text;
  for (const auto& [extension, count] : counts_)
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", count, extension);
  notes.push_back(fmt::format(
      "files of other formats are left out ({}), the first: {}: JPEG, PNG and WebP are read", text, first_));
}

void MissingCaptions::add(const nlohmann::json& fields, const std::string& name,
                          std::span<const char* const> keys) {
  const auto is_key = [&](const std::string& key) { return std::ranges::find(keys, key) != keys.end(); };
  bool has_text = false;
  for (const auto& [key, value] : fields.items()) {
    const std::string lower = lower_case(key);
    const bool resembles =
        std::ranges::any_of(std::to_array<std::string_view>({"text", "caption", "prompt", "descr"}),
                            [&](std::string_view word) { return lower.find(word) != std::string::npos; });
    if (is_key(key) ? value.is_null() || value.is_string() || value.is_array() : !resembles) continue;
    has_text = true;
    ++found_[is_key(key) ? fmt::format("a {} under \"{}\"", value.type_name(), key)
                         : fmt::format("a key \"{}\"", key)];
  }
  if (!has_text) return;
  if (++count_ > 1) return;
  first_ = name;
  for (const char* key : keys) keys_ += fmt::format("{}\"{}\"", keys_.empty() ? "" : ", ", key);
}

void MissingCaptions::append_note(int64_t num_pictures, std::vector<std::string>& notes) const {
  if (count_ == 0) return;
  std::vector<std::string> texts;
  for (const auto& [what, count] : found_) texts.push_back(fmt::format("{} ({} times)", what, count));
  notes.push_back(
      fmt::format("{} of {} pictures have no caption, but {}, the first is {}: captions are texts under {}",
                  count_, num_pictures, some_of(texts), first_, keys_));
}

std::vector<Caption> captions_of(const nlohmann::json& fields, const std::string& where) {
  std::vector<Caption> captions;
  for (const char* key : kCaptionKeys) {
    const auto field = fields.find(key);
    if (field == fields.end() || field->is_null()) continue;
    if (field->is_array()) {
      for (const auto& value : *field) captions.push_back(caption_of(value, where));
    } else if (field->is_string()) {
      captions.push_back(caption_of(*field, where));
    }
    if (!captions.empty()) break;
  }
  std::erase_if(captions, [](const Caption& caption) { return caption.text.empty(); });
  return captions;
}

}  // namespace kiln::layouts
