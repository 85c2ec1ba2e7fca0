// The folder of generated pictures: PNG files, the settings that made them, and optionally one .npz of all.
// An interrupted run continues where it stopped.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/json.h"
#include "data/images/images.h"
#include "data/images/npz.h"

namespace kiln {

struct SampleOutputOptions {
  std::string folder;
  std::string npz;  // "" = none
  bool write_png = true;
  // The role of this process if several draw into one folder. The others pass their images to the first as
  // PNG files, in FOLDER/passing without write_png.
  enum class Role { kOnly, kFirst, kOther } role = Role::kOnly;
  int64_t num_images = 0, height = 0, width = 0;
  // Everything that decides the pixels. Kept in FOLDER/sampling.json and NPZ.json, and as a hash in the npz.
  nlohmann::json settings{};
  // Further information for readers of those files. It follows from the settings and is never compared.
  nlohmann::json notes = nlohmann::json::object();
  // Returns what an image shows: its prompt, or the name of its class. PNG files say it, with the settings.
  std::function<std::string(int64_t image)> words{};  // null: not known
};

// Returns the texts of a PNG file that Kiln drew: what it shows, for any reader ("Description"; "": several
// things), and `drawn`, all that decided its pixels, as JSON ("kiln").
PngTexts drawn_texts(const std::string& words, const nlohmann::json& drawn);

class SampleOutput {
 public:
  // names[i] is the file name of image i, without folder. Throws Error: the folder or the npz holds images of
  // other settings (naming the keys that differ), or they cannot be written.
  SampleOutput(const SampleOutputOptions& options, std::vector<std::string> names);

  // Returns the images still to be drawn, ascending. REQUIRES: the role is not kOther.
  std::vector<int64_t> missing() const;
  // Adds an image. REQUIRES: the images of missing(), in that order.
  void add(int64_t index, const Image& image);
  // Completes the .npz. REQUIRES: this process or others added every missing image; the role is not kOther.
  void finish();
  // Writes FOLDER/grid.png with the first `count` images and returns its path. REQUIRES: write_png and
  // finish().
  std::string write_grid(int64_t count, int64_t columns) const;
  // Writes FOLDER/grid.html with the same images, each with its caption underneath, and returns its path.
  // REQUIRES: a caption for each, write_png and finish().
  std::string write_captioned_grid(const std::vector<std::string>& captions, int64_t columns) const;

 private:
  std::string path(int64_t index) const;
  bool writes_files() const { return options_.write_png || is_shared_; }
  std::string settings_path() const;
  nlohmann::json all_settings() const;
  PngTexts texts_of(int64_t index) const;
  void check_settings() const;
  void write_settings() const;
  void append_to_npz_below(int64_t index);

  SampleOutputOptions options_;
  std::string images_folder_;  // of the PNG files
  bool is_shared_ = false;     // there may be PNG files of other processes
  std::vector<std::string> names_;
  nlohmann::json drawn_;  // all_settings() but what the images show, of which there may be much
  std::string subject_;   // "prompt" or "class": the key of what an image shows
  std::unique_ptr<NpzImageWriter> npz_;
};

}  // namespace kiln
