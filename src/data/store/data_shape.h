// The shapes of samples and of batches. The loader, the step, the plan and conformance share this one
// description. Torch-free.
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

// The arrays of a batch.
enum class BatchArray {
  kX0,
  kNoise,
  kInputNoise,
  kTimeUniform,
  kClassLabels,
  kTextRows,
  kTextOffsets,
  kTextDropped,
  kImageHw,
  kAspectRatio,
};

// The arrays of a batch of one lane, with their shapes and element types.
struct BatchShape {
  int64_t rows = 0, channels = 0;
  Lane lane{};
  bool has_labels = false, has_image_size = false, has_input_noise = false;
  bool has_halo = false;  // x_0, noise and times have a row more, that of the sample before the first one
  int64_t text_rows = 0;  // of all captions together
  int64_t text_width = 0;
  Dtype text_dtype = Dtype::kF32;

  int64_t sample_elements() const { return channels * lane.area(); }
  int64_t rows_with_halo() const { return rows + (has_halo ? 1 : 0); }

  // Calls visitor(array, dtype, sizes) for each array in a fixed order.
  template <class Visitor>
  void visit(Visitor&& visitor) const {
    using enum BatchArray;
    using Sizes = std::vector<int64_t>;
    visitor(kX0, Dtype::kF32, Sizes{rows_with_halo(), channels, lane.height, lane.width});
    visitor(kNoise, Dtype::kF32, Sizes{rows_with_halo(), channels, lane.height, lane.width});
    if (has_input_noise) visitor(kInputNoise, Dtype::kF32, Sizes{rows, channels, lane.height, lane.width});
    visitor(kTimeUniform, Dtype::kF64, Sizes{rows_with_halo()});
    if (has_labels) visitor(kClassLabels, Dtype::kI64, Sizes{rows});
    if (text_width > 0) {
      visitor(kTextRows, text_dtype, Sizes{text_rows, text_width});
      visitor(kTextOffsets, Dtype::kI32, Sizes{rows + 1});
      visitor(kTextDropped, Dtype::kBool, Sizes{rows});
    }
    if (has_image_size) {
      visitor(kImageHw, Dtype::kF32, Sizes{rows, 2});
      visitor(kAspectRatio, Dtype::kF32, Sizes{rows, 1});
    }
  }

  int64_t bytes() const;
};

}  // namespace kiln
