// Buckets: the sizes that pictures of different shapes are brought to, so that all pictures of a batch have
// one size. Torch-free.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kiln {

struct Bucket {
  int64_t height = 0, width = 0;  // pixels
  // The table's key: height / width, rounded to two decimals. Pictures are compared with it, and
  // micro-conditioned models get it as an input.
  double aspect_ratio = 0;
};

// Returns PixArt's published table for a base of 256, 512, 1024, 2048 or 2880 pixels: 40 buckets of about
// base * base pixels. Throws Error for another base.
std::vector<Bucket> published_buckets(int64_t base);

// `text` is "pixart" for the published table of `image_size`, or a list of sizes such as "512x512,448x576"
// (height x width). Sides must be multiples of `multiple`. Throws Error naming what does not fit.
std::vector<Bucket> parse_buckets(const std::string& text, int64_t image_size, int64_t multiple);

// Returns the side of the square that has the mean area of the buckets, rounded to a multiple of `multiple`.
// A table of buckets is named after it.
int64_t side_of(const std::vector<Bucket>& buckets, int64_t multiple);

// Returns the index of the bucket whose key is nearest to a picture's height / width. Of equally near ones it
// is the first, as in PixArt.
size_t nearest_bucket(const std::vector<Bucket>& buckets, int64_t height, int64_t width);

// `ratio` is width to height, such as "16:9". Returns the published bucket of `base` that is nearest to it if
// its sides are multiples of `multiple`, else a bucket of about base * base pixels whose sides are such
// multiples. Throws Error for another text.
Bucket bucket_of_ratio(const std::string& ratio, int64_t base, int64_t multiple);

// Returns, for each bucket, the index of the bucket that its pictures go to, so that none keeps fewer than
// `least` of them. The smallest bucket joins the one nearest to it, again and again. `counts` has the number
// of pictures of each bucket. A bucket without pictures keeps its own index.
std::vector<size_t> merge_small_buckets(const std::vector<Bucket>& buckets, std::vector<int64_t> counts,
                                        int64_t least);

}  // namespace kiln
