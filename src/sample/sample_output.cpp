#include "sample/sample_output.h"

#include <fmt/ranges.h>

#include <filesystem>
#include <fstream>

#include "core/atomic_file.h"
#include "core/error.h"

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

SampleOutput::SampleOutput(const SampleOutputOptions& options, std::vector<std::string> names)
    : options_(options), names_(std::move(names)) {
  std::error_code error;
  fs::create_directories(options_.folder, error);
  if (error) fail("sample", "cannot make the folder {}: {}", options_.folder, error.message());
  check_settings();
  if (!options_.npz.empty())
    npz_ = NpzImageWriter::open(options_.npz, options_.num_images, options_.height, options_.width);
}

std::string SampleOutput::path(int64_t index) const {
  return (fs::path(options_.folder) / names_[static_cast<size_t>(index)]).string();
}

void SampleOutput::check_settings() const {
  const std::string path = (fs::path(options_.folder) / kSettingsFile).string();
  std::ifstream file(path);
  if (!file) {
    write_file_atomically("sample", path, options_.settings.dump(2) + "\n");
    return;
  }
  const json before = json::parse(file, nullptr, /*allow_exceptions=*/false);
  const std::vector<std::string> keys = differing_keys(before, options_.settings);
  if (!keys.empty())
    fail("sample", "{} holds images drawn with another {}: choose another --out, or remove it",
         options_.folder, fmt::join(keys, ", "));
}

std::vector<int64_t> SampleOutput::missing() const {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < options_.num_images; ++i) {
    const bool drawn = options_.write_png ? fs::exists(path(i)) : i < npz_->num_written();
    if (!drawn) indices.push_back(i);
  }
  return indices;
}

void SampleOutput::add(int64_t index, const Image& image) {
  append_to_npz_below(index);
  if (options_.write_png) write_png(path(index), image);
  if (npz_ && npz_->num_written() == index) npz_->add(image);
}

// Images that an earlier run drew but that the .npz lacks come from their PNG files, which lose nothing.
void SampleOutput::append_to_npz_below(int64_t index) {
  while (npz_ && npz_->num_written() < index) npz_->add(read_image(path(npz_->num_written())));
}

void SampleOutput::finish() {
  append_to_npz_below(options_.num_images);
  if (npz_) npz_->finish();
}

std::string SampleOutput::write_grid(int64_t count, int64_t columns) const {
  std::vector<Image> images;
  for (int64_t i = 0; i < count; ++i) images.push_back(read_image(path(i)));
  const std::string grid = (fs::path(options_.folder) / "grid.png").string();
  write_png(grid, make_grid(images, columns));
  return grid;
}

}  // namespace kiln
