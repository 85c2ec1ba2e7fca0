// What every source of batches does alike: sizes, and the draws that depend on the stream's position alone.
// Torch-free.
#pragma once
#include <span>

#include "data/batches.h"

namespace kiln {

// Throws Error for impossible options.
void check_batch_options(const BatchOptions& options);

// Sizes a batch for this rank's rows of the global batch at `first_position`.
void shape_batch(const BatchOptions& options, int64_t first_position, int64_t channels, int64_t height,
                 int64_t width, bool has_labels, Batch& batch);

// Noise, timestep and label dropout of a row.
void draw_common(const BatchOptions& options, int64_t row, std::span<float> noise, Batch& batch);

// Whether the row is mirrored, given that both sides are at hand.
bool draw_flip(const BatchOptions& options, int64_t position);

}  // namespace kiln
