// skipped.jsonl of a store or a run: the pictures that were left out, which resuming reads. Torch-free.
#pragma once
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "core/json.h"
#include "data/images/image_dataset.h"

namespace kiln {

inline constexpr const char* kLeftOutFile = "skipped.jsonl";

// The list of a run. A line is {"picture": NAME, "why": TEXT, "stage": STEP, "of": SET, ...}: a picture of
// the data set SET ("--data") is left out until the stage ends that begins at STEP. Lines are on the disk
// when add() returns, since the run goes on without the picture from there.
class LeftOutList {
 public:
  // Goes on with the file, or makes it. Every rank of a run may have it open. Throws Error.
  LeftOutList(const std::string& path, int64_t stage, std::string of);
  ~LeftOutList();
  LeftOutList(const LeftOutList&) = delete;
  LeftOutList& operator=(const LeftOutList&) = delete;

  // Adds lines, made by left_out_line(), for pictures that have none. Returns how many. Throws Error.
  int64_t add(std::vector<nlohmann::ordered_json> lines);

 private:
  bool read_on();

  const std::string path_;
  const int64_t stage_;
  const std::string of_;
  int file_ = -1;
  int64_t num_read_ = 0;                    // bytes, of whole lines
  std::unordered_set<std::string> listed_;  // names
};

// A line of any such file. A name that is no UTF-8 is also in "name_hex".
nlohmann::ordered_json left_out_line(const std::string& name, const std::string& why);
// Returns the name in a line, which may be no UTF-8.
std::string left_out_name(const nlohmann::json& line);

// Returns the whole lines of a file, as a list; an empty one without a file.
nlohmann::json read_left_out(const std::string& path);
// Makes a file ready for the stage that begins at `stage`: removes a torn line, the lines of later stages,
// which a run that fell back trains anew, and if `begins` also those of this stage. Throws Error.
void prepare_left_out(const std::string& path, int64_t stage, bool begins);

// The pictures that an extraction left out.
//
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
