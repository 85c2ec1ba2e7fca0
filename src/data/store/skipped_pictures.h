// STORE/skipped.jsonl: the pictures that an extraction left out. Torch-free.
#pragma once
#include <cstdio>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "data/images/image_dataset.h"
#include "data/images/left_out_list.h"

namespace kiln {

// Writes a left_out_line() for each picture as it is left out. After an interruption the file is what it is
// without one.
class SkippedPictures {
 public:
  // Goes on behind what an interrupted extraction left in the folder, without a torn last line. There is no
  // file before the first picture.
  explicit SkippedPictures(const std::string& folder);
  // Writes the line unless the picture has one. Throws Error.
  void add(const SkippedPicture& picture);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string path_;
  std::unordered_set<std::string> names_;
  std::unique_ptr<std::FILE, Close> file_;
};

// Returns the whole lines of a folder's file, in order; empty without one.
std::vector<SkippedPicture> read_skipped(const std::string& folder);
// Writes the lines of all parts to `folder`, if there are any. Throws Error.
void join_skipped(const std::string& folder, const std::vector<std::string>& parts);

}  // namespace kiln
