// Buckets: the sizes that pictures of different shapes are brought to, so that a batch is of one size.
// Torch-free.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kiln {

struct Bucket {
  int64_t height = 0, width = 0;  // pixels
  double aspect_ratio = 0;  // height / width, rounded to two decimals: the table's key, which pictures are
                            // compared with and micro-conditioned models are told
};

// PixArt's published table for a base of 256, 512, 1024, 2048 or 2880 pixels: 40 buckets of about base * base
// pixels. Throws Error for another base.
std::vector<Bucket> published_buckets(int64_t base);

// text: "pixart", the published table of `image_size`; or sizes, "512x512,448x576" (height x width). Sides
// must be multiples of `multiple`. Throws Error naming what does not fit.
std::vector<Bucket> parse_buckets(const std::string& text, int64_t image_size, int64_t multiple);

// The side of the square that has the mean area of the buckets, in steps of `multiple`: what a table of them
// is called.
int64_t side_of(const std::vector<Bucket>& buckets, int64_t multiple);

// The bucket whose key is nearest to a picture's height / width; the first of equally near ones, as in
// PixArt.
size_t nearest_bucket(const std::vector<Bucket>& buckets, int64_t height, int64_t width);

// ratio: "16:9", width to height. The published bucket of `base` nearest to it, where its sides are multiples
// of `multiple`; else the sides of about base * base pixels that are. Throws Error for another text.
Bucket bucket_of_ratio(const std::string& ratio, int64_t base, int64_t multiple);

// Which bucket each bucket's pictures go to, so that none keeps fewer than `least` of them: the smallest
// joins the one nearest to it, again and again. counts: pictures of each. A bucket without pictures stays
// itself.
std::vector<size_t> merge_small_buckets(const std::vector<Bucket>& buckets, std::vector<int64_t> counts,
                                        int64_t least);

}  // namespace kiln
