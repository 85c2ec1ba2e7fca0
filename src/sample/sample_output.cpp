#include "sample/sample_output.h"

#include <filesystem>

#include "core/error.h"
#include "core/files/atomic_file.h"
#include "core/page/page.h"
#include "core/text/json_text.h"
#include "core/text/some_of.h"
#include "core/text/utf8.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kSettingsFile = "sampling.json";

std::vector<std::string> differing_keys(const json& before, const json& now) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : now.items())
    if (!before.is_object() || !before.contains(key) || before.at(key) != value) keys.push_back(key);
  return keys;
}

}  // namespace

PngTexts drawn_texts(const std::string& words, const json& drawn) {
  // Class names may be folder names, which need not be UTF-8.
  return {{"Software", "Kiln"}, {"Description", words}, {"kiln", dump_utf8(drawn)}};
}

SampleOutput::SampleOutput(const SampleOutputOptions& options, std::vector<std::string> names)
    : options_(options), images_folder_(options.folder), names_(std::move(names)) {
  if (!options_.write_png) images_folder_ = (fs::path(options_.folder) / "passing").string();
  // Other processes may have drawn for an earlier command, too.
  is_shared_ = options_.role != SampleOutputOptions::Role::kOnly ||
               (!options_.write_png && fs::exists(images_folder_));
  const std::string folder = writes_files() ? images_folder_ : options_.folder;
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) fail("sample", "cannot make the folder {}: {}", folder, error.message());
  drawn_ = all_settings();
  subject_ = drawn_.contains("prompts") ? "prompt" : "class";
  for (const char* of_all : {"prompts", "classes"}) drawn_.erase(of_all);
  if (options_.role == SampleOutputOptions::Role::kOther) return;
  check_settings();
  if (!options_.npz.empty())
    npz_ = NpzImageWriter::open(options_.npz, options_.num_images, options_.height, options_.width,
                                options_.settings.dump());
  write_settings();
}

std::string SampleOutput::path(int64_t index) const {
  return (fs::path(images_folder_) / names_[static_cast<size_t>(index)]).string();
}

std::string SampleOutput::settings_path() const {
  return (fs::path(options_.folder) / kSettingsFile).string();
}

void SampleOutput::check_settings() const {
  if (!fs::exists(settings_path())) return;
  const json before = read_json_or_discarded("sample", settings_path());
  const std::vector<std::string> keys = differing_keys(before, options_.settings);
  if (!keys.empty())
    fail("sample", "{} holds images drawn with other settings: {}; choose another --out, or remove it",
         options_.folder, some_of(keys));
}

json SampleOutput::all_settings() const {
  json all = options_.settings;
  all.update(options_.notes);
  return all;
}

// Those of one image: its own prompt or class instead of all of them.
PngTexts SampleOutput::texts_of(int64_t index) const {
  const std::string words = options_.words ? options_.words(index) : "";
  json drawn = drawn_;
  drawn["index"] = index;  // "image" is the picture that drawing started from
  if (!words.empty()) drawn[subject_] = words;
  return drawn_texts(words, drawn);
}

// Also adds notes that a folder of an earlier version lacks.
void SampleOutput::write_settings() const {
  const json all = all_settings();
  const std::string text = all.dump(2) + "\n";
  const bool is_there =
      fs::exists(settings_path()) && read_json_or_discarded("sample", settings_path()) == all;
  if (!is_there) write_file_atomically("sample", settings_path(), text);
  if (!options_.npz.empty()) write_file_atomically("sample", options_.npz + ".json", text);
}

std::vector<int64_t> SampleOutput::missing() const {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < options_.num_images; ++i) {
    const bool in_npz = npz_ && i < npz_->num_written();
    const bool drawn = (in_npz && !options_.write_png) || (writes_files() && fs::exists(path(i)));
    if (!drawn) indices.push_back(i);
  }
  return indices;
}

void SampleOutput::add(int64_t index, const Image& image) {
  if (!is_shared_) append_to_npz_below(index);
  if (writes_files()) write_png(path(index), image, texts_of(index));
  if (is_shared_) return;  // which images below exist is known only at the end
  if (npz_ && npz_->num_written() == index) npz_->add(image);
}

// Adds images below `index` that the .npz lacks, from their PNG files, which are lossless. An earlier run
// drew them.
void SampleOutput::append_to_npz_below(int64_t index) {
  while (npz_ && npz_->num_written() < index) npz_->add(read_image(path(npz_->num_written())));
}

void SampleOutput::finish() {
  append_to_npz_below(options_.num_images);
  if (npz_) npz_->finish();
  if (!options_.write_png) fs::remove_all(images_folder_);
}

std::string SampleOutput::write_grid(int64_t count, int64_t columns) const {
  std::vector<Image> images;
  json drawn = drawn_;
  const std::string subjects = subject_ + (subject_ == "class" ? "es" : "s");
  for (int64_t i = 0; i < count; ++i) {
    images.push_back(read_image(path(i)));
    std::string words = options_.words ? options_.words(i) : "";
    if (!words.empty()) drawn[subjects].push_back(std::move(words));
  }
  std::string grid = (fs::path(options_.folder) / "grid.png").string();
  write_png(grid, make_grid(images, columns), drawn_texts("", drawn));
  return grid;
}

std::string SampleOutput::write_captioned_grid(const std::vector<std::string>& captions,
                                               int64_t columns) const {
  Page page("Samples");
  for (size_t i = 0; i < captions.size(); ++i) page.picture(names_[i], captions[i], columns);
  std::string path = (fs::path(options_.folder) / "grid.html").string();
  write_file_atomically("sample", path, page.html());
  return path;
}

}  // namespace kiln
