// The folder of generated pictures: PNG files, what made them, and optionally one .npz of all. An interrupted
// run goes on where it stopped.
#pragma once
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/images/images.h"
#include "data/images/npz.h"

namespace kiln {

struct SampleOutputOptions {
  std::string folder;
  std::string npz;  // "" = none
  bool write_png = true;
  // What this process is where several draw into one folder. The others pass their images to the first as PNG
  // files, in FOLDER/passing without write_png.
  enum class Role { kOnly, kFirst, kOther } role = Role::kOnly;
  int64_t num_images = 0, height = 0, width = 0;
  // All that decides the pixels; kept in FOLDER/sampling.json and NPZ.json, as a hash in the npz.
  nlohmann::json settings{};
  // What else readers of those files are told: it follows from the settings, and is never compared.
  nlohmann::json notes = nlohmann::json::object();
};

class SampleOutput {
 public:
  // names[i]: file name of image i, without folder. Throws Error: the folder holds images of other settings
  // (naming the keys that differ), the npz does, or they cannot be written.
  SampleOutput(const SampleOutputOptions& options, std::vector<std::string> names);

  // Images still to be drawn, ascending. REQUIRES: not the role kOther.
  std::vector<int64_t> missing() const;
  // REQUIRES: the images of missing(), in that order.
  void add(int64_t index, const Image& image);
  // Completes the .npz. REQUIRES: every missing image was added, by this
  // process or others; not the role kOther.
  void finish();
  // FOLDER/grid.png of the first `count` images; returns its path. REQUIRES: write_png and finish().
  std::string write_grid(int64_t count, int64_t columns) const;
  // FOLDER/grid.html, the same images each with its caption underneath; returns its path. REQUIRES: a caption
  // for each, write_png and finish().
  std::string write_captioned_grid(const std::vector<std::string>& captions, int64_t columns) const;

 private:
  std::string path(int64_t index) const;
  bool writes_files() const { return options_.write_png || is_shared_; }
  std::string settings_path() const;
  void check_settings() const;
  void write_settings() const;
  void append_to_npz_below(int64_t index);

  SampleOutputOptions options_;
  std::string images_folder_;  // of the PNG files
  bool is_shared_ = false;     // PNG files of others may be there
  std::vector<std::string> names_;
  std::unique_ptr<NpzImageWriter> npz_;
};

}  // namespace kiln
