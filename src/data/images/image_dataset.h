// Folders and archives of pictures as one indexed list (docs/datasets.md). Torch-free.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "data/images/image_header.h"
#include "data/images/images.h"

namespace kiln {

struct Caption {
  std::string text{};
  std::string kind{"caption"};  // its source, or what the data set calls it
  float weight = 1;             // how often it is chosen, relative to the picture's others; not negative
};

struct ImageRecord {
  std::string name;    // relative path, unique, the sample's id
  int64_t label = -1;  // class index, -1 = none
  std::vector<Caption> captions{};
};

// Layouts: ImageFolder (class = folder, sorted as torchvision does), Hugging Face metadata.jsonl (file_name,
// plus captions, plus label), PixArt's data_info.json, WebDataset tars (jpg|png|webp + cls/txt/json), .txt
// captions beside images.
class ImageDataset {
 public:
  // Detects the layout. Throws Error saying what was looked for.
  static std::unique_ptr<ImageDataset> open(const std::string& path);
  virtual ~ImageDataset() = default;
  const std::vector<ImageRecord>& records() const { return records_; }          // in a fixed order
  const std::vector<std::string>& class_names() const { return class_names_; }  // empty: no labels
  // Returns what of the data set is not taken although somebody may think so, one line each for people. May
  // look at every file: only whoever prints it asks.
  virtual std::vector<std::string> notes() const { return notes_; }
  virtual const char* layout()
      const = 0;  // "image_folder" | "metadata_jsonl" | "data_info" | "webdataset" | "images"
  // All are thread-safe and throw Error naming the file.
  virtual PictureBytes bytes(int64_t index) const = 0;       // the picture's file, for reading in pieces
  virtual std::vector<std::byte> read(int64_t index) const;  // the whole file
  virtual ImageHeader header(int64_t index) const;
  virtual PngTexts png_texts(int64_t index) const;  // none if it is no PNG
  // Reads and decodes the picture; with `orient` turned and mirrored as its EXIF orientation says. Throws
  // BrokenPicture if its file can be read, but not decoded.
  Image load(int64_t index, bool orient = false) const;

 protected:
  std::vector<ImageRecord> records_;
  std::vector<std::string> class_names_, notes_;
};

// A picture that is left out, and the message that says why.
struct SkippedPicture {
  std::string name, why;
};

// Returns the XXH3 of the names and labels in order. An interrupted extraction or training continues only on
// the same list.
std::string dataset_fingerprint(const ImageDataset& dataset);

// DiT's centre crop to (size, size). DiT enlarges pictures whose short side is below `size`; here they are
// errors unless `enlarge` is set.
struct Crop {
  int64_t size = 0;
  bool enlarge = false;
  bool orient = true;  // turn pictures as their EXIF orientation says, which DiT does not
};

// Returns the message that a picture is too small for a square of `size` pixels a side.
std::string too_small_text(const std::string& name, int64_t height, int64_t width, int64_t size);

// Loads and crops a picture. Throws BrokenPicture when it is broken or too small.
Image load_cropped(const ImageDataset& dataset, int64_t index, const Crop& crop);

struct PreparedImage {
  int64_t index = 0;
  Image image;
  std::string error;
};
// Loads pictures in worker threads and delivers them in order. A picture for which `load` throws
// BrokenPicture or NoSuchFile is delivered with `error` set; next() throws any other error.
class ImagePipeline {
 public:
  // Calls load(i) for i in [first, last) from several threads at once. At most `queue_depth` pictures are
  // loaded ahead.
  ImagePipeline(int64_t first, int64_t last, std::function<Image(int64_t)> load, int num_threads,
                int64_t queue_depth = 64);
  ~ImagePipeline();
  bool next(PreparedImage& out);  // false at the end

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kiln
