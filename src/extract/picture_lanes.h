// What pictures are brought to before they are encoded, ahead or while training: all to one square, or each
// to its bucket.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "data/images/bucket_assignment.h"
#include "data/images/image_dataset.h"
#include "data/store/data_shape.h"
#include "data/store/sample_order.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

struct PictureLaneOptions {
  std::string data;        // what messages call the pictures
  int64_t image_size = 0;  // the side of the square, or what a table of buckets is called; 0: its own side
  // "": all pictures are brought to the square. Else the table: pixart, the published one of image_size, or
  // HxW,HxW,...
  std::string buckets;
  std::vector<Bucket> among{};  // the buckets of the table that there are; empty: all
  int64_t bucket_min = 1;       // buckets of fewer pictures join others; 1: none does
  bool orient = true;           // pictures are turned as their EXIF orientation says
  bool enlarge = false;         // those smaller than their bucket, which else are left out
  bool strict = false;          // one that cannot be used ends the command
  bool shows_progress = false;  // while headers are read
  int num_threads = 1;          // that read them
};

// The pictures of each lane follow each other, in the order of the data set; a place is an index into that
// order.
class PictureLanes {
 public:
  // Without buckets one lane of all pictures. With them, first reads the headers of all pictures, of which
  // each rank takes a share. A collective. `dataset` must live as long. Throws Error: sizes that do not fit
  // an autoencoder that makes `downsample` pixels one, or a table in which no picture can be used.
  PictureLanes(const PictureLaneOptions& options, const ImageDataset& dataset, int64_t downsample,
               ProcessGroup& group);

  struct Shape {
    int64_t height = 0, width = 0;  // pixels
    double aspect_ratio = 0;        // the bucket's key; 0 without buckets
    int64_t first = 0, last = 0;    // places
  };
  const std::vector<Shape>& shapes() const { return shapes_; }
  bool takes_small() const { return options_.enlarge; }
  bool has_buckets() const { return !sizes_.empty(); }
  std::vector<Bucket> buckets() const;                // that have pictures; empty without any
  int64_t image_size() const { return image_size_; }  // what the store says
  std::vector<Lane> latent_lanes() const;             // the shapes of what they are encoded to
  std::vector<SampleLane> sample_lanes() const;  // which pictures each lane has, as indices of the data set
  const std::string& table_text() const { return table_text_; }  // what each bucket holds, line by line
  // The pictures that have no place, a line each: unreadable ones that this rank has read, and on the first
  // rank those that do not cover their bucket.
  const std::vector<std::string>& complaints() const { return complaints_; }

  int64_t num_places() const { return static_cast<int64_t>(pictures_.size()); }
  int64_t num_left_out() const { return num_left_out_; }  // pictures without a place
  // Throws the Error that no picture can be used.
  [[noreturn]] void refuse_all() const;
  // A line about so many pictures that got no sample; "" of none.
  std::string skipped_text(int64_t num_skipped) const;
  int64_t picture(int64_t place) const { return pictures_[static_cast<size_t>(place)]; }
  int64_t lane_of(int64_t place) const;
  // Height and width of the original picture as seen; {0, 0} without buckets.
  std::array<int64_t, 2> image_hw(int64_t picture) const;
  // The picture as a sample of its lane. Thread-safe. Throws Error naming it when it is broken or too small.
  Image load(int64_t picture, int64_t lane) const;

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
  void make_buckets(ProcessGroup& group);
  void read_sizes(ProcessGroup& group);
  void describe(const BucketAssignment& assignment, bool is_first);

  const PictureLaneOptions options_;
  const ImageDataset& dataset_;
  const int64_t downsample_;
  std::vector<Shape> shapes_;
  std::vector<int64_t> pictures_;   // of each place
  std::vector<PictureSize> sizes_;  // of each picture; empty without buckets
  int64_t image_size_ = 0, num_left_out_ = 0;
  std::string table_text_;
  std::vector<std::string> complaints_;
};

// Throws Error unless an autoencoder that makes `downsample` pixels one takes pictures of this size.
void check_image_size(int64_t downsample, int64_t image_size);

}  // namespace kiln
