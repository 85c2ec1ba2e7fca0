// What a picture looks like, in few numbers: whether it is blurred, and whether it resembles another one.
// Torch-free.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "data/images/images.h"

namespace kiln {

// The rows and columns of the grid whose mean greys are compared.
inline constexpr int64_t kLookRows = 8, kLookColumns = 9;

struct PictureLook {
  // Variance of the Laplacian (4 times a pixel less its neighbours) of the greys 0 to 255.
  double sharpness = 0;
  std::array<uint8_t, kLookRows * kLookColumns> greys{};
  // dHash: a bit for each two neighbours in a row, 1 if the right one is lighter.
  uint64_t hash = 0;
  bool is_plain = false;  // the greys hardly differ: the hash says nothing
};

// Returns the power of two by which a picture's sides are divided before it is looked at, so that the longer
// one has 512 pixels at most: sharpness depends on the size.
int64_t look_shrink(int64_t height, int64_t width);
// `shrink`: what of look_shrink() is left to do, as decoding may have divided the sides already.
PictureLook look_of(const Image& image, int64_t shrink);

// Finds pictures that look like earlier ones, without comparing every two of them: if hashes differ in n bits
// at most, one of n + 1 groups of bits is equal.
class LookIndex {
 public:
  // `most_bits`: 0 to 7 bits in which hashes of pictures that look alike may differ.
  explicit LookIndex(int most_bits);
  // Returns the first picture that looks like this one. If there is none, remembers this one for the calls to
  // come. A picture that is plain looks like no other.
  std::optional<int64_t> find_or_add(int64_t picture, const PictureLook& look);

 private:
  uint64_t group(uint64_t hash, size_t number) const;

  struct Known {
    int64_t picture;
    PictureLook look;
  };
  int most_bits_;
  std::vector<Known> known_;
  std::vector<std::unordered_map<uint64_t, std::vector<size_t>>> by_group_;  // indices of known_
};

}  // namespace kiln
