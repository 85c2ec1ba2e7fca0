// The sizes that pictures are brought to before they are encoded, in advance or while training: all to one
// square, or each to its bucket.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "data/images/bucket_assignment.h"
#include "data/images/image_dataset.h"
#include "data/images/left_out_list.h"
#include "data/store/data_shape.h"
#include "data/store/sample_order.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

struct PictureLaneOptions {
  std::string data;        // what messages call the pictures
  int64_t image_size = 0;  // side of the square, or the name of a table of buckets; 0: its side_of()
  // "": all pictures are brought to the square. Else a table: pixart (the published one of image_size) or
  // HxW,HxW,...
  std::string buckets;
  std::vector<Bucket> among{};  // the only buckets to use of the table; empty: all
  int64_t bucket_min = 1;       // buckets of fewer pictures join others; 1: none does
  bool orient = true;           // turn pictures as their EXIF orientation says
  bool enlarge = false;         // enlarge small pictures, which else are left out
  bool strict = false;          // a picture that cannot be used ends the command
  bool shows_progress = false;  // of reading headers
  int num_threads = 1;          // threads that read headers
};

// Gives each picture its lane and its place. The pictures of each lane follow each other, in the order of the
// data set; a place is an index into that order.
class PictureLanes {
 public:
  // Without buckets all pictures are one lane. With buckets, first reads the headers of all pictures, of
  // which each rank takes a share. The autoencoder divides sides by `downsample`. `dataset` must outlive this
  // object. Throws Error: sizes that the autoencoder cannot take, or a table in which no picture can be used.
  // A collective.
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
  std::vector<Bucket> buckets() const;                // those with pictures; empty without a table
  int64_t image_size() const { return image_size_; }  // the one that the store names
  std::vector<Lane> latent_lanes() const;             // the shapes of the latents
  std::vector<SampleLane> sample_lanes() const;       // the pictures of each lane, as indices of the data set
  const std::string& table_text() const { return table_text_; }  // what each bucket holds, line by line
  // The pictures without a place: the unreadable ones of this rank's share, and on the first rank those that
  // do not cover their bucket.
  const std::vector<SkippedPicture>& skipped() const { return skipped_; }

  int64_t num_places() const { return static_cast<int64_t>(pictures_.size()); }
  int64_t num_left_out() const { return num_left_out_; }  // pictures without a place
  // Throws the Error that says that no picture can be used.
  [[noreturn]] void refuse_all() const;
  // Returns a line about the number of pictures that got no sample; "" for 0.
  std::string skipped_text(int64_t num_skipped) const;
  int64_t picture(int64_t place) const { return pictures_[static_cast<size_t>(place)]; }
  int64_t lane_of(int64_t place) const;
  // Height and width of the original picture after it is turned; {0, 0} without buckets.
  std::array<int64_t, 2> image_hw(int64_t picture) const;
  // Loads the picture in the size of its lane. Thread-safe. Throws Error naming it when it is broken or too
  // small.
  Image load(int64_t picture, int64_t lane) const;

  struct Range {
    int64_t first = 0, last = 0;  // places
    bool empty() const { return first >= last; }
  };
  // Returns a rank's share: whole batches, each of one lane, so that batches are those of a single rank.
  Range of_rank(int64_t rank, int64_t world_size, int64_t batch) const;

  // Returns a hash of which picture stands where, for store.json. `number_of` numbers the pictures; null: as
  // the data set does.
  std::string fingerprint(const std::function<int64_t(int64_t picture)>& number_of = {}) const;

 private:
  void make_square();
  void make_buckets(ProcessGroup& group);
  void read_sizes(ProcessGroup& group);
  void describe(const BucketAssignment& assignment, bool is_first);

  const PictureLaneOptions options_;
  const ImageDataset& dataset_;
  const int64_t downsample_;
  std::vector<Shape> shapes_;
  std::vector<int64_t> pictures_;   // index of the picture at each place
  std::vector<PictureSize> sizes_;  // of each picture; empty without buckets
  int64_t image_size_ = 0, num_left_out_ = 0;
  std::string table_text_;
  std::vector<SkippedPicture> skipped_;
};

// Throws Error unless an autoencoder that divides sides by `downsample` takes pictures of this size.
void check_image_size(int64_t downsample, int64_t image_size);

// Writes a picture as an autoencoder's input: (3, H, W) in [-1, 1], rounded as torchvision's ToTensor and
// Normalize(0.5, 0.5) round; optionally mirrored.
void write_image_values(const Image& image, bool mirrored, std::span<float> out);

}  // namespace kiln
