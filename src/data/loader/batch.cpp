#include "data/loader/batch.h"

#include <functional>
#include <numeric>

namespace kiln {

int64_t Batch::position(int64_t row) const {
  if (row < size()) return first_position + row;
  return first_position - first_row + (first_row + global_size - 1) % global_size;
}

const void* Batch::data(BatchArray array) const {
  const void* data = nullptr;
  shape.visit([&](const HostArray& host, auto member) {
    if (host.array == array) data = (this->*member).data();
  });
  return data;
}

int64_t HostArray::num_elements() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies());
}

int64_t BatchShape::bytes() const {
  int64_t bytes = 0;
  visit([&](const HostArray& array, auto) {
    bytes += array.num_elements() * static_cast<int64_t>(dtype_size(array.dtype));
  });
  return bytes;
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
