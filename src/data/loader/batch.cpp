#include "data/loader/batch.h"

#include <stdexcept>

namespace kiln {

int64_t Batch::position(int64_t row) const {
  if (row < size()) return first_position + row;
  return first_position - first_row + (first_row + global_size - 1) % global_size;
}

const void* Batch::data(BatchArray array) const {
  switch (array) {
    case BatchArray::kX0:
      return x_0.data();
    case BatchArray::kNoise:
      return noise.data();
    case BatchArray::kInputNoise:
      return input_noise.data();
    case BatchArray::kTimeUniform:
      return time_uniform.data();
    case BatchArray::kClassLabels:
      return class_labels.data();
    case BatchArray::kTextRows:
      return text_rows.data();
    case BatchArray::kTextOffsets:
      return text_offsets.data();
    case BatchArray::kTextDropped:
      return text_dropped.data();
    case BatchArray::kImageHw:
      return image_hw.data();
    case BatchArray::kAspectRatio:
      return aspect_ratio.data();
  }
  throw std::logic_error("Batch::data: an unknown array");
}

BatchShape batch_shape(const BatchOptions& options, const DataShape& data, const Lane& lane, int64_t rows,
                       int64_t text_rows) {
  return {.rows = rows,
          .channels = data.channels,
          .lane = lane,
          .has_labels = data.num_classes > 0,
          .has_image_size = data.has_image_size,
          .has_input_noise = options.input_perturbation > 0,
          .has_halo = options.has_halo,
          .text_rows = text_rows,
          .text_width = data.text.width,
          .text_dtype = data.text.dtype};
}

}  // namespace kiln
