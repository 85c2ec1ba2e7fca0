// Assigns pictures to buckets. Torch-free.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "data/images/bucket_table.h"
#include "data/images/image_dataset.h"

namespace kiln {

// Height and width of a picture after it is turned, if its orientation counts. 0 x 0 if its file does not
// say.
struct PictureSize {
  int64_t height = 0, width = 0;
  bool is_known() const { return height > 0 && width > 0; }
};

struct BucketAssignment {
  struct Filled {
    Bucket bucket;
    std::vector<int64_t> pictures;  // in the order of the data set
    int64_t num_joined = 0;         // those that came from buckets too small to stay
  };
  std::vector<Filled> filled;      // none is empty; in the order of the table
  std::vector<Bucket> empty;       // buckets of the table that are nearest to no picture
  std::vector<Bucket> joined;      // buckets whose pictures went to another bucket
  std::vector<int64_t> too_small;  // pictures that do not cover their bucket, and are left out

  int64_t num_pictures() const;
};

// Every picture of known size goes to the bucket nearest to it. Buckets of fewer than `least` pictures join
// the nearest other one. A picture that does not cover its bucket is left out, unless `enlarge`. Throws Error
// when fewer than `least` pictures are left.
BucketAssignment assign_buckets(const std::vector<Bucket>& table, const std::vector<PictureSize>& sizes,
                                int64_t least, bool enlarge);

// Returns the message that a picture does not cover its bucket.
std::string not_covering_text(const std::string& name, const PictureSize& size);

// Returns a table with a line for each bucket that holds pictures, then a line about the buckets that joined
// others and one about the empty ones.
std::string assignment_text(const BucketAssignment& assignment);

struct BucketCrop {
  Bucket bucket;
  bool lanczos = false;  // resize with Lanczos instead of bicubic
  bool orient = true;    // turn the picture as its EXIF orientation says
};
// Loads a picture and brings it to the bucket as PixArt's trainer does: resizes it so that it just covers the
// bucket, and crops it from the centre. `size` is what its header says. Throws BrokenPicture when
// it is broken or has another size.
Image load_covering(const ImageDataset& dataset, int64_t index, const PictureSize& size,
                    const BucketCrop& crop);

}  // namespace kiln
