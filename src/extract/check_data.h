// kiln check-data: what extraction would meet in a data set, found before it.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/choices.h"
#include "core/json.h"
#include "data/images/bucket_table.h"
#include "data/images/image_dataset.h"
#include "extract/settings.h"

namespace kiln {

enum class Finding {
  kBroken,      // its file cannot be read or decoded: extraction leaves it out
  kSmall,       // it does not cover its bucket, or the square: extraction leaves it out
  kCopy,        // it has the bytes of an earlier picture
  kSimilar,     // it looks like an earlier picture (data/images/picture_look.h)
  kBlurred,     // its sharpness is below the bound
  kExtension,   // its name says another format
  kColors,      // its colours are read otherwise than it means them (data/images/color_note.h)
  kNoCaption,   // it has none, or one that cannot be read
  kCutCaption,  // the encoder takes only a part
};
template <>
struct Choices<Finding> {
  static constexpr std::pair<Finding, const char*> kAll[] = {{Finding::kBroken, "broken"},
                                                             {Finding::kSmall, "small"},
                                                             {Finding::kCopy, "copy"},
                                                             {Finding::kSimilar, "similar"},
                                                             {Finding::kBlurred, "blurred"},
                                                             {Finding::kExtension, "extension"},
                                                             {Finding::kColors, "colors"},
                                                             {Finding::kNoCaption, "no-caption"},
                                                             {Finding::kCutCaption, "cut-caption"}};
};

struct CheckOptions {
  ExtractOptions extract{};  // the pictures, their sizes and captions; nothing is encoded
  int64_t similar_bits = 3;  // of 64, in which hashes of similar pictures may differ: 0 to 7
  double blurred_below = 30;
  std::string move_to{};  // folder that the pictures of the findings `moved` are moved to; "": none is
  std::string moved = "broken,small,copy";
};

struct FoundPicture {
  int64_t picture = 0;  // index of the data set
  Finding finding = Finding::kBroken;
  std::string why{};  // names the picture
  int64_t like = -1;  // the earlier picture of kCopy and kSimilar
};
// What a bucket, or the square of --image-size, gets and loses.
struct CheckedBucket {
  Bucket bucket{};
  int64_t num_taken = 0, num_small = 0, num_broken = 0;  // pictures
  int64_t num_enlarged = 0;                              // of those that are taken
  double cut_share = 0;                                  // mean share of a picture that is cropped away
};
struct CheckedCaptions {
  int64_t num_captions = 0;
  int64_t max_tokens = 0;  // 0: no encoder was given, which says what is cut
  int64_t num_cut = 0;
  int64_t num_tokens = 0, num_lost_tokens = 0;  // before captions are cut
};
struct CheckedData {
  std::shared_ptr<const ImageDataset> dataset;
  int64_t num_bytes = 0;
  std::vector<FoundPicture> found{};  // by finding, then by picture
  std::vector<CheckedBucket> buckets{};
  std::string no_buckets{};  // the error that ends an extraction to these buckets
  CheckedCaptions captions{};
};

// Reads and decodes every picture once, a JPEG in reduced size. Shows progress on stderr. Throws Error: what
// ImageDataset::open() refuses, impossible options.
CheckedData check_data(const CheckOptions& options);

int64_t num_taken(const CheckedData& data);  // by an extraction with these options
std::string to_text(const CheckedData& data, const CheckOptions& options);
nlohmann::json to_json(const CheckedData& data);
// Returns a page for a browser with some pictures of each finding.
std::string to_html(const CheckedData& data, const CheckOptions& options);

// Throws Error unless pictures of such a data set can be moved to options.move_to.
void check_move(const CheckOptions& options, const ImageDataset& dataset);
// Moves what options.moved names, with captions beside it and lines of metadata.jsonl. Returns the number of
// pictures. REQUIRES: check_move(). Throws Error: a file of this name is there, another file system.
int64_t move_found(const CheckedData& data, const CheckOptions& options);

}  // namespace kiln
