// What every source of batches does alike: sizes, and the draws that depend on the stream's position alone.
// Torch-free.
#pragma once
#include <array>
#include <span>
#include <vector>

#include "data/loader/batch.h"

namespace kiln {

// Rows [first, first + count) of the global batch are `rank`'s. Ranks' counts differ by one at most.
struct RowRange {
  int64_t first = 0, count = 0;
};
RowRange rank_rows(int64_t global_batch, int64_t rank, int64_t world_size);

// The number in [0, 1) that the timestep at a position of the stream is made of, without a loader.
double time_uniform_at(uint64_t seed, int64_t position);

// Throws Error for impossible options.
void check_batch_options(const BatchOptions& options);

// Sizes a batch of a lane for this rank's rows of the global batch at `first_position`. Captions are sized by
// who knows their rows.
void shape_batch(const BatchOptions& options, int64_t first_position, const DataShape& data, const Lane& lane,
                 Batch& batch);

// Gives the batch room for captions of so many rows each. options.text_dropout_prob is the caller's business.
void shape_text(std::span<const int64_t> rows_of_caption, Batch& batch);

// The lanes that the options choose among all those of the data.
std::vector<SampleLane> chosen_lanes(std::vector<SampleLane> all, const BatchOptions& options);

// Tells the model of a row's original picture, of so many pixels (height, width), and of its bucket.
// REQUIRES: the batch has image sizes.
void fill_image_size(std::array<int64_t, 2> image_hw, int64_t row, Batch& batch);

// Whether the caption at a position of the stream is dropped.
bool draws_text_drop(const BatchOptions& options, int64_t position);

// Noise, timestep and label dropout of a row.
void draw_common(const BatchOptions& options, int64_t row, std::span<float> noise, Batch& batch);

// Whether the row is mirrored, given that both sides are at hand.
bool draw_flip(const BatchOptions& options, int64_t position);

}  // namespace kiln
