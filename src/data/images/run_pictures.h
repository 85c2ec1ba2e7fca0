// The pictures of a run that encodes them while it trains. Torch-free.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/images/image_dataset.h"

namespace kiln {

// Those pictures of a data set that can be used, as far as their headers tell. A picture that is left out
// stays so until the stage of the run ends, also if its file is repaired or removed meanwhile. So a resumed
// run has the samples of an uninterrupted one. What only decoding shows is known later: such a picture keeps
// its place in the list, and its reader takes another one for it.
//
// The content of each file is hashed when it is read. It must stay the same, in this process and, after
// record_in(), in those that resume the run.
class RunPictures : public ImageDataset {
 public:
  struct Options {
    int64_t least_side = 0;  // pictures with a shorter side are left out
    int num_threads = 1;     // that read headers
    // What left_out() was when the run was saved. null: the run begins.
    nlohmann::json left_out{};
  };
  RunPictures(std::unique_ptr<ImageDataset> all, const Options& options);
  ~RunPictures() override;

  const char* layout() const override { return all_->layout(); }
  PictureBytes bytes(int64_t index) const override;  // throws BrokenPicture for one that was removed
  ImageHeader header(int64_t index) const override { return files_.at(static_cast<size_t>(index)).header; }
  // Throws BrokenPicture for one that was left out; Error for one whose content is not what the run read
  // before.
  std::vector<std::byte> read(int64_t index) const override;

  // The data set with all pictures, and where a picture is in it; -1: it was removed since.
  const ImageDataset& all() const { return *all_; }
  int64_t index_in_all(int64_t index) const { return files_.at(static_cast<size_t>(index)).index; }
  // Names the pictures, their labels and the sizes of their files.
  std::string identity() const;

  // All pictures that are left out, those that headers showed first.
  std::vector<SkippedPicture> all_left_out() const;
  // Pictures that were left out while reading, since the last call.
  std::vector<SkippedPicture> take_new_left_out() const;
  // Leaves a picture out that decoding showed to be broken. Thread-safe.
  void leave_out(int64_t index, const std::string& why) const;
  // All of this as JSON, for a checkpoint; and takes over what another rank has left out.
  nlohmann::json left_out() const;
  void leave_out(const nlohmann::json& of_another_rank) const;

  // Keeps the hashes of contents in a file of the run folder, which all ranks share, and compares with those
  // that are in it. `is_new` empties it first. Throws Error. Not thread-safe.
  void record_in(const std::string& path, bool is_new) const;
  // Returns the name of the first picture that is not in such a file with this label and size; "" if all are.
  std::string first_unrecorded(const std::string& path) const;

 private:
  struct File {
    int64_t index = 0, num_bytes = 0;
    ImageHeader header{};
  };
  void read_headers(const Options& options, const std::map<std::string, bool>& known);
  void insert_removed(const nlohmann::json& left_out);
  const std::string* why_left_out(int64_t index) const;
  void check_content(int64_t index, std::span<const std::byte> content) const;
  void remember(int64_t index, uint64_t hash) const;
  // An entry of the file for each picture.
  struct Recorded {
    uint64_t file = 0;     // hash of its name, label and size
    uint64_t content = 0;  // 0: not read yet
  };
  std::vector<Recorded> recorded() const;

  const std::unique_ptr<ImageDataset> all_;
  std::vector<File> files_;
  std::vector<SkippedPicture> by_header_;
  mutable std::vector<std::atomic<uint64_t>> contents_;  // hash of each picture's file; 0: not read yet
  mutable int record_ = -1;                              // file descriptor
  mutable std::mutex mutex_;
  mutable std::map<int64_t, std::string> broken_;  // why, of those that have a place
  mutable std::atomic<size_t> num_broken_ = 0;
  mutable std::vector<SkippedPicture> new_;
};

}  // namespace kiln
