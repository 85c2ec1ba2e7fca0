// The pictures of a run that encodes them while it trains. Torch-free.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/json.h"
#include "data/images/image_dataset.h"
#include "data/images/left_out_list.h"

namespace kiln {

// Those pictures of a data set that can be used, as far as their headers tell. A picture that is left out
// stays so until the stage of the run ends, also if its file is repaired or removed meanwhile. So a resumed
// run has the samples of an uninterrupted one. What only decoding shows is known later: such a picture keeps
// its place in the list, and its reader takes another one for it.
//
// The content of each file is hashed when it is read. It must stay the same, on all ranks of this run and,
// after record_in(), in those that resume it.
class RunPictures : public ImageDataset {
 public:
  struct Options {
    int64_t least_side = 0;  // pictures with a shorter side are left out
    int num_threads = 1;     // that read headers
    // The lines of LeftOutList that the stage has; empty: it begins. Those of other data sets are passed
    // over.
    nlohmann::json left_out = nlohmann::json::array();
    std::string of = "--data";  // the data set's name in them
  };
  // Throws Error: a header that cannot be read just now, though it may be whole.
  RunPictures(std::unique_ptr<ImageDataset> all, const Options& options);
  ~RunPictures() override;

  const char* layout() const override { return all_->layout(); }
  std::vector<std::string> notes() const override { return all_->notes(); }
  PictureBytes bytes(int64_t index) const override;  // throws BrokenPicture for one that was removed
  ImageHeader header(int64_t index) const override { return files_.at(static_cast<size_t>(index)).header; }
  // Those of a picture that was left out are what they were then.
  PngTexts png_texts(int64_t index) const override;
  // Throws BrokenPicture for one that was left out, by another rank too; Error for one whose content is not
  // what the run read before.
  std::vector<std::byte> read(int64_t index) const override;

  // The data set with all pictures, and where a picture is in it; -1: it was removed since.
  const ImageDataset& all() const { return *all_; }
  int64_t index_in_all(int64_t index) const { return files_.at(static_cast<size_t>(index)).index; }
  // Names the pictures, their labels and the sizes of their files.
  std::string identity() const;

  // True if the stage had left pictures out before these were opened, whether or not they are whole now.
  bool had_left_out() const { return had_left_out_; }
  // All pictures that are left out, those that headers showed first.
  std::vector<SkippedPicture> all_left_out() const;
  // Pictures that were left out while reading since the last call, and that nobody had left out before.
  std::vector<SkippedPicture> take_new_left_out() const;
  // Leaves a picture out that decoding showed to be broken. Thread-safe.
  void leave_out(int64_t index, const std::string& why) const;

  // Keeps what is found out in two files of a run folder, which all ranks share, and compares with what is in
  // them: the hashes of contents of the stage that begins at `stage`, and the pictures that are left out, in
  // the LeftOutList. `is_new` empties the former first. Throws Error. Not thread-safe.
  void record_in(const std::string& run, int64_t stage, bool is_new) const;
  // Returns the name of the first picture that such a file does not have with this label and size; "" if all
  // are in it.
  std::string first_unrecorded(const std::string& run, int64_t stage) const;

 private:
  struct File {
    int64_t index = 0, num_bytes = 0;
    ImageHeader header{};
  };
  // A picture that decoding showed to be broken.
  struct Broken {
    std::string why;
    PngTexts texts;
  };
  using Known = std::unordered_map<std::string, int64_t>;  // the names in lines, and where they are in all_
  void read_headers(const Options& options, const Known& known, std::map<int64_t, nlohmann::json> removed);
  void insert(int64_t place, const nlohmann::json& line, int64_t index_in_all);
  nlohmann::ordered_json line_of(int64_t index, const Broken& broken) const;
  const Broken* find_broken(int64_t index) const;
  void check_content(int64_t index, std::span<const std::byte> content) const;
  uint64_t content_of(int64_t index) const;
  void remember(int64_t index, uint64_t hash) const;
  std::string record_path(const std::string& run, int64_t stage) const;
  // An entry of the file for each picture.
  struct Recorded {
    uint64_t file = 0;     // hash of its name, label and size
    uint64_t content = 0;  // 0: not read yet; kLeftOut
  };
  static constexpr uint64_t kLeftOut = ~uint64_t{0};
  std::vector<Recorded> recorded() const;

  const std::unique_ptr<ImageDataset> all_;
  const std::string of_;
  bool had_left_out_ = false;
  std::vector<File> files_;
  std::vector<SkippedPicture> by_header_;
  mutable std::vector<std::atomic<uint64_t>> contents_;  // Recorded::content
  mutable int record_ = -1;                              // file descriptor
  mutable std::mutex mutex_;
  mutable std::unique_ptr<LeftOutList> list_;  // null: none is kept
  mutable std::map<int64_t, Broken> broken_;   // by place
  mutable std::atomic<size_t> num_broken_ = 0;
  mutable std::vector<SkippedPicture> new_;
};

}  // namespace kiln
