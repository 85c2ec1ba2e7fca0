#include "data/loader/batch_draws.h"

#include "core/error.h"
#include "core/philox.h"

namespace kiln {

namespace {

// Adds a random offset to each whole channel of the noise (Guttenberg 2023, "Diffusion with offset noise").
void add_offset(const BatchOptions& options, uint64_t position, std::span<float> noise, int64_t channels) {
  std::vector<float> offsets(static_cast<size_t>(channels));
  philox_normal(options.seed, Draw::kOffsetNoise, position, offsets);
  const size_t area = noise.size() / offsets.size();
  for (size_t i = 0; i < noise.size(); ++i)
    noise[i] += static_cast<float>(options.offset_noise) * offsets[i / area];
}

}  // namespace

void check_batch_options(const BatchOptions& options) {
  if (options.global_batch < 1)
    fail("loader", "expected global_batch of at least 1, got {}", options.global_batch);
  if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size)
    fail("loader", "expected a rank from 0 to {}, got {}", options.world_size - 1, options.rank);
  if (options.global_batch < options.world_size)
    fail("loader", "expected a global_batch of at least one image for each of {} ranks, got {}",
         options.world_size, options.global_batch);
  if (!(options.class_dropout_prob >= 0 && options.class_dropout_prob <= 1))
    fail("loader", "expected class_dropout_prob from 0 to 1, got {}", options.class_dropout_prob);
  if (!(options.text_dropout_prob >= 0 && options.text_dropout_prob <= 1))
    fail("loader", "expected text_dropout_prob from 0 to 1, got {}", options.text_dropout_prob);
  if (options.class_dropout_prob > 0 && options.null_class < 0)
    fail("loader",
         "expected a null class for class_dropout_prob {}, got none: the model has no class for dropped "
         "labels",
         options.class_dropout_prob);
}

RowRange rank_rows(int64_t global_batch, int64_t rank, int64_t world_size) {
  const int64_t first = rank * global_batch / world_size;
  return {.first = first, .count = (rank + 1) * global_batch / world_size - first};
}

double time_uniform_at(uint64_t seed, int64_t position) {
  return philox_uniform(seed, Draw::kTimestep, static_cast<uint64_t>(position));
}

void shape_batch(const BatchOptions& options, int64_t first_position, const DataShape& data, const Lane& lane,
                 Batch& batch) {
  const RowRange rows = rank_rows(options.global_batch, options.rank, options.world_size);
  batch.shape = batch_shape(options, data, lane, rows.count);
  batch.global_size = options.global_batch;
  batch.first_row = rows.first;
  batch.first_position = first_position + rows.first;
  BatchShape without_text = batch.shape;
  without_text.text_width = 0;
  without_text.visit(
      [&](const HostArray& array, auto member) { (batch.*member).resize(array.num_elements()); });
  batch.sample_ids.resize(batch.size_with_halo());
}

void shape_text(std::span<const int64_t> rows_of_caption, Batch& batch) {
  batch.text_offsets.assign(1, 0);
  for (const int64_t rows : rows_of_caption)
    batch.text_offsets.push_back(static_cast<int32_t>(batch.text_offsets.back() + rows));
  batch.shape.text_rows = batch.text_offsets.back();
  batch.text_rows.resize(static_cast<size_t>(batch.shape.text_rows * batch.shape.text_width) *
                         dtype_size(batch.shape.text_dtype));
  batch.text_dropped.assign(static_cast<size_t>(batch.size()), 0);
}

std::vector<SampleLane> chosen_lanes(std::vector<SampleLane> all, const BatchOptions& options) {
  if (!options.lanes.empty()) all = options.lanes;
  if (options.only_lane) return {all.at(static_cast<size_t>(*options.only_lane))};
  return all;
}

void fill_image_size(std::array<int64_t, 2> image_hw, int64_t row, Batch& batch) {
  const Lane& lane = batch.shape.lane;
  batch.image_hw[2 * row] = static_cast<float>(image_hw[0]);
  batch.image_hw[2 * row + 1] = static_cast<float>(image_hw[1]);
  batch.aspect_ratio[row] = static_cast<float>(lane.aspect_ratio > 0 ? lane.aspect_ratio
                                                                     : static_cast<double>(lane.height) /
                                                                           static_cast<double>(lane.width));
}

bool draws_text_drop(const BatchOptions& options, int64_t position) {
  return options.text_dropout_prob > 0 &&
         philox_uniform(options.seed, Draw::kTextDrop, static_cast<uint64_t>(position)) <
             options.text_dropout_prob;
}

CaptionChoice choose_captions(const TextStore& text, const BatchOptions& options, const Batch& batch) {
  CaptionChoice choice;
  for (int64_t row = 0; row < batch.size(); ++row) {
    const int64_t position = batch.first_position + row;
    const double u = philox_uniform(options.seed, Draw::kCaption, static_cast<uint64_t>(position));
    int64_t entry = text.entry(batch.sample_ids[row], u);
    const bool is_dropped = draws_text_drop(options, position) || entry == TextStore::kNullEntry;
    if (is_dropped && !options.has_null_text) entry = TextStore::kNullEntry;
    choice.entries.push_back(entry);
    choice.dropped.push_back(is_dropped && options.has_null_text);
  }
  return choice;
}

void draw_common(const BatchOptions& options, int64_t row, std::span<float> noise, Batch& batch) {
  const auto position = static_cast<uint64_t>(batch.position(row));
  philox_normal(options.seed, Draw::kNoise, position, noise);
  if (options.offset_noise > 0) add_offset(options, position, noise, batch.shape.channels);
  batch.time_uniform[row] = time_uniform_at(options.seed, batch.position(row));
  if (row == batch.size()) return;  // of the halo's sample, the model sees nothing
  if (options.input_perturbation > 0) {
    const auto perturbed =
        std::span(batch.input_noise).subspan(static_cast<size_t>(row) * noise.size(), noise.size());
    philox_normal(options.seed, Draw::kPerturbation, position, perturbed);
    const auto share = static_cast<float>(options.input_perturbation);
    for (size_t i = 0; i < noise.size(); ++i) perturbed[i] = noise[i] + share * perturbed[i];
  }
  if (batch.class_labels.empty() || options.class_dropout_prob == 0) return;
  if (philox_uniform(options.seed, Draw::kLabelDrop, position) < options.class_dropout_prob)
    batch.class_labels[row] = options.null_class;
}

bool draw_flip(const BatchOptions& options, int64_t position) {
  return options.flip && philox_uniform(options.seed, Draw::kFlip, static_cast<uint64_t>(position)) < 0.5;
}

}  // namespace kiln
