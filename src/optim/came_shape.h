// The options of CAME, and how it sees a tensor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/choices.h"

namespace kiln {

// Which tensors are factored, and how. Other tensors keep one squared mean for each element, and their
// average is not scaled.
enum class CameVariant {
  kCamePytorch,  // came-pytorch 0.1.3: all of two or more dimensions, over the last two. A convolution is one
                 // small matrix for each pair of channels
  kSana,         // the Sana repository's: linear layers and 1x1 convolutions, over output and input channels
};
template <>
struct Choices<CameVariant> {
  static constexpr std::pair<CameVariant, const char*> kAll[] = {{CameVariant::kCamePytorch, "came"},
                                                                 {CameVariant::kSana, "sana"}};
};

struct CameOptions {
  double beta1 = 0.9, beta2 = 0.999, beta3 = 0.9999;  // of the update, its square, its distance
  double eps_square = 1e-30, eps_distance = 1e-16;
  double clip_threshold = 1;  // highest root mean square of an update, per tensor
  double weight_decay = 0;    // decoupled
  CameVariant variant = CameVariant::kCamePytorch;
};

// A tensor as CAME sees it: row-major matrices, one after another.
struct CameShape {
  int64_t matrices = 0, rows = 1, columns = 1;
  bool is_factored = false;
  std::vector<int64_t> row_shape{}, column_shape{};  // of all its row means and column means

  // A matrix of one row equals its column means, and its row mean cancels out.
  bool has_rows() const { return rows > 1; }
};
CameShape came_shape(CameVariant variant, const std::vector<int64_t>& shape);

// The buffers of Came::state(), in order.
enum CameBuffer : size_t {
  kCameMean,
  kCameSquare,
  kCameSquareRow,
  kCameSquareColumn,
  kCameDistanceRow,
  kCameDistanceColumn
};

}  // namespace kiln
