// The order in which pictures are encoded, and what each is brought to: all to one square, or bucket by
// bucket.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "data/images/bucket_assignment.h"
#include "data/images/image_dataset.h"
#include "extract/extract_options.h"
#include "extract/settings.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

// A place is an index into that order. Pictures of a lane follow each other, in the order of the data set.
class PictureLanes {
 public:
  // Without --buckets one lane of all pictures. With them, first reads the headers of all pictures, of which
  // each rank takes a share; prints what the buckets hold, and names the pictures that are left out. A
  // collective. Throws Error: a table that does not fit the autoencoder, or in which no picture can be used.
  PictureLanes(const ExtractOptions& options, const ExtractSettings& settings, const ImageDataset& dataset,
               int64_t downsample, ProcessGroup& group);

  struct Shape {
    int64_t height = 0, width = 0;  // pixels
    double aspect_ratio = 0;        // the bucket's key; 0 without buckets
    int64_t first = 0, last = 0;    // places
  };
  const std::vector<Shape>& shapes() const { return shapes_; }
  bool has_buckets() const { return !sizes_.empty(); }
  int64_t image_size() const { return image_size_; }  // what the store says

  int64_t num_places() const { return static_cast<int64_t>(pictures_.size()); }
  int64_t num_left_out() const { return num_left_out_; }  // pictures without a place
  // Throws the Error that no picture can be used.
  [[noreturn]] void refuse_all() const;
  // A line about so many pictures that got no sample; "" of none.
  std::string skipped_text(int64_t num_skipped) const;
  int64_t picture(int64_t place) const { return pictures_[static_cast<size_t>(place)]; }
  int64_t lane_of(int64_t place) const;
  // Height and width of the original picture as seen; {0, 0} without buckets.
  std::array<int64_t, 2> image_hw(int64_t place) const;
  // The picture as a sample. Thread-safe. Throws Error naming it when it is broken or too small.
  Image load(int64_t place) const;

  struct Range {
    int64_t first = 0, last = 0;  // places
    bool empty() const { return first >= last; }
  };
  // A rank's share: whole batches of one lane each, so that they are those of a single rank.
  Range of_rank(int64_t rank, int64_t world_size, int64_t batch) const;

  // All that decides which picture stands where, for store.json.
  std::string fingerprint() const;

 private:
  void make_square();
  void make_buckets(int64_t downsample, int num_threads, ProcessGroup& group);
  void read_sizes(int num_threads, ProcessGroup& group);
  void report(const BucketAssignment& assignment, ProcessGroup& group) const;

  const ExtractOptions options_;
  const ImageDataset& dataset_;
  std::vector<Shape> shapes_;
  std::vector<int64_t> pictures_;   // of each place
  std::vector<PictureSize> sizes_;  // of each picture; empty without buckets
  int64_t image_size_ = 0, num_left_out_ = 0;
};

}  // namespace kiln
