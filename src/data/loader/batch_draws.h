// Shared by all sources of batches: sizes, and the draws that depend only on the position in the stream.
// Torch-free.
#pragma once
#include <array>
#include <span>
#include <vector>

#include "data/loader/batch.h"
#include "data/text_store/text_store.h"

namespace kiln {

// The rows [first, first + count) of the global batch that belong to `rank`. The counts of ranks differ by
// one at most.
struct RowRange {
  int64_t first = 0, count = 0;
};
RowRange rank_rows(int64_t global_batch, int64_t rank, int64_t world_size);

// Returns the number in [0, 1) that decides the timestep at a position of the stream. Needs no loader.
double time_uniform_at(uint64_t seed, int64_t position);

// Throws Error for impossible options.
void check_batch_options(const BatchOptions& options);

// Sizes a batch of a lane for this rank's rows of the global batch at `first_position`. Captions are sized by
// shape_text().
void shape_batch(const BatchOptions& options, int64_t first_position, const DataShape& data, const Lane& lane,
                 Batch& batch);

// Sizes the batch for captions with these numbers of rows and marks none as dropped. The caller takes care of
// options.text_dropout_prob.
void shape_text(std::span<const int64_t> rows_of_caption, Batch& batch);

// Returns the lanes that the options choose. `all` are those of the data.
std::vector<SampleLane> chosen_lanes(std::vector<SampleLane> all, const BatchOptions& options);

// Writes the height and width in pixels of a row's original picture, and the aspect ratio of its bucket.
// REQUIRES: the batch has image sizes.
void fill_image_size(std::array<int64_t, 2> image_hw, int64_t row, Batch& batch);

// True if the caption at a position of the stream is dropped.
bool draws_text_drop(const BatchOptions& options, int64_t position);

// The caption of each row of a batch.
struct CaptionChoice {
  std::vector<int64_t> entries;  // the empty caption's if dropped and the model has no null rows
  std::vector<uint8_t> dropped;  // 1: the model's learned null rows replace the caption
};

// Draws a caption for each row by its position in the stream. A sample without a caption counts as dropped.
// REQUIRES: the batch has its sample_ids.
CaptionChoice choose_captions(const TextStore& text, const BatchOptions& options, const Batch& batch);

// Draws the noise, timestep and label dropout of a row; of the halo's only what its target is made of.
void draw_common(const BatchOptions& options, int64_t row, std::span<float> noise, Batch& batch);

// True if the sample at a position of the stream is mirrored. REQUIRES: the source can mirror it.
bool draw_flip(const BatchOptions& options, int64_t position);

}  // namespace kiln
