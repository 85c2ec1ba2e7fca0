// The shapes of samples. The loader, the step, the plan and conformance share this one description.
// Torch-free.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace kiln {

// A shape of samples: height and width of x_0, in latents or pixels. All samples of a batch are of one lane.
struct Lane {
  int64_t height = 0, width = 0;
  // height / width of the pictures' bucket as its table has it. Micro-conditioned models get it as an input.
  // 0: the pictures were not brought to buckets.
  double aspect_ratio = 0;
  int64_t area() const { return height * width; }
  friend bool operator==(const Lane&, const Lane&) = default;
};

// Returns "32 x 32" for one lane; for several their number, and the smallest and the largest by area.
std::string lanes_text(const std::vector<Lane>& lanes);

// The shape of captions, which are rows of a text encoder.
struct TextShape {
  int64_t width = 0;          // D; 0: there are no captions
  int64_t max_rows = 0;       // the most of one caption
  double mean_rows = 0;       // over all captions
  bool is_padded = false;     // every caption has max_rows
  Dtype dtype = Dtype::kF32;  // of the rows
  int64_t hidden_rows =
      0;  // of an instruction, which an encoder sees before each caption and the model does not
};

// Describes all samples as the model sees them.
struct DataShape {
  int64_t channels = 0;
  int64_t num_classes = 0;    // 0: no labels
  std::vector<Lane> lanes{};  // at least one
  TextShape text{};
  bool has_image_size = false;  // the original pictures' sizes are known

  const Lane& largest() const;  // the lane with the most latents
  // Returns the longer side of the only lane. With several lanes, returns the side of the square that is
  // about as large as the squarest of them. A table of buckets is named after it.
  int64_t side() const;
};

}  // namespace kiln
