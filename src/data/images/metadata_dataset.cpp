// Hugging Face's imagefolder: metadata.jsonl, one JSON object per picture. PixArt's data_info.json: a list of
// them.
#include <array>
#include <filesystem>
#include <unordered_set>

#include "core/error.h"
#include "core/files/input_file.h"
#include "core/text/json_text.h"
#include "data/images/dataset_layouts.h"

namespace kiln::layouts {
namespace {

constexpr std::array<const char*, 2> kDataInfoKeys = {"prompt", "sharegpt4v"};

nlohmann::json parse_line(const std::string& line, const std::string& where) {
  auto fields = json_or_discarded("dataset", line, where);
  if (!fields.is_object()) fail("dataset", "expected a JSON object ({})", where);
  return fields;
}

// Returns the path in field `key`. Throws Error if it leads out of the folder.
std::string file_name_of(const nlohmann::json& fields, const char* key, const std::string& where) {
  const auto field = fields.find(key);
  if (field == fields.end() || !field->is_string()) fail("dataset", "expected a {} ({})", key, where);
  auto name = field->get<std::string>();
  const std::filesystem::path path(name);
  bool leaves = name.empty() || path.is_absolute();
  for (const auto& part : path) leaves = leaves || part == "..";
  if (leaves) fail("dataset", "expected a {} below the folder, got '{}' ({})", key, name, where);
  return name;
}

}  // namespace

std::unique_ptr<ImageDataset> open_metadata(const std::string& root, const std::string& metadata_path) {
  LineReader file("dataset", metadata_path);
  std::vector<ImageRecord> records;
  LabelCollector labels;
  MissingCaptions missing;
  std::unordered_set<std::string> names;
  int64_t line_number = 0;
  for (std::string line; file.next(line);) {
    const std::string where = fmt::format("{}, line {}", metadata_path, ++line_number);
    if (without_trailing_space(line).empty()) continue;
    const auto fields = parse_line(line, where);
    ImageRecord record{file_name_of(fields, "file_name", where), -1, captions_of(fields, where)};
    if (!names.insert(record.name).second)
      fail("dataset", "expected each file once, got '{}' again ({})", record.name, where);
    if (record.captions.empty()) missing.add(fields, record.name, kCaptionKeys);
    if (const auto label = fields.find("label"); label != fields.end() && !label->is_null())
      labels.add(*label, where);
    else
      labels.add_none();
    records.push_back(std::move(record));
  }
  auto class_names = labels.finish(records, metadata_path);
  auto dataset = std::make_unique<FileDataset>(root, "metadata_jsonl");
  dataset->set_list(metadata_path);
  std::vector<std::string> notes;
  missing.append_note(std::ssize(records), notes);
  dataset->set(std::move(records), std::move(class_names), std::move(notes));
  return dataset;
}

std::unique_ptr<ImageDataset> open_data_info(const std::string& root, const std::string& list_path) {
  const nlohmann::json list = read_json_file("dataset", list_path, kLongList);
  if (!list.is_array()) fail("dataset", "expected a JSON list of pictures ({})", list_path);
  std::vector<ImageRecord> records;
  std::unordered_set<std::string> names;
  MissingCaptions missing;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string where = fmt::format("{}, picture {}", list_path, i);
    if (!list[i].is_object()) fail("dataset", "expected a JSON object ({})", where);
    ImageRecord record{file_name_of(list[i], "path", where), -1, {}};
    if (!names.insert(record.name).second)
      fail("dataset", "expected each file once, got '{}' again ({})", record.name, where);
    for (const char* kind : kDataInfoKeys)
      if (const auto text = list[i].find(kind); text != list[i].end() && text->is_string() && !text->empty())
        record.captions.push_back({.text = text->get<std::string>(), .kind = kind});
    if (record.captions.empty()) missing.add(list[i], record.name, kDataInfoKeys);
    records.push_back(std::move(record));
  }
  auto dataset = std::make_unique<FileDataset>(root, "data_info");
  dataset->set_list(list_path);
  std::vector<std::string> notes;
  missing.append_note(std::ssize(records), notes);
  dataset->set(std::move(records), {}, std::move(notes));
  return dataset;
}

}  // namespace kiln::layouts
