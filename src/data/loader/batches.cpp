#include "data/loader/batches.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/philox.h"
#include "data/loader/batch_draws.h"
#include "data/loader/prefetched_batches.h"
#include "data/store/latent_kernels.h"

namespace kiln {
namespace {

class StoreFill {
 public:
  StoreFill(std::shared_ptr<FeatureStore> store, std::shared_ptr<const TextStore> text,
            const BatchOptions& options)
      : store_(std::move(store)),
        text_(std::move(text)),
        options_(options),
        shape_(store_shape(store_->info())),
        order_(options.seed, chosen_lanes(store_->sample_lanes(), options), options.global_batch, 1,
               options.begin),
        mirrors_pixels_(options.flip && store_->info().autoencoder == "pixels" &&
                        store_->info().num_flips == 1) {
    if (text_) shape_.text = text_shape(*text_);
  }

  void operator()(int64_t first_position, Batch& batch) const {
    const int64_t number = options_.only_lane.value_or(order_.batch_at(first_position).lane);
    const Lane& lane = shape_.lanes[static_cast<size_t>(number)];
    shape_batch(options_, first_position, shape_, lane, batch);
    for (int64_t row = 0; row < batch.size_with_halo(); ++row)
      batch.sample_ids[row] = order_.sample_at(batch.position(row));
    store_->prefetch(batch.sample_ids);
    if (text_) fill_text(batch);
    for (int64_t row = 0; row < batch.size(); ++row) {
      if (!batch.class_labels.empty()) batch.class_labels[row] = label(batch.sample_ids[row]);
      if (shape_.has_image_size) fill_image_size(store_->image_hw(batch.sample_ids[row]), row, batch);
    }
    const int64_t latent_size = batch.shape.sample_elements();
    Scratch scratch;
    for (int64_t row = 0; row < batch.size_with_halo(); ++row) {
      fill_latent(batch, row, std::span(batch.x_0).subspan(row * latent_size, latent_size), scratch);
      draw_common(options_, row, std::span(batch.noise).subspan(row * latent_size, latent_size), batch);
    }
  }

  const SampleOrder& order() const { return order_; }

 private:
  struct Scratch {
    std::vector<float> logvar, epsilon;
  };

  void fill_latent(const Batch& batch, int64_t row, std::span<float> x, Scratch& scratch) const {
    const StoreInfo& info = store_->info();
    const auto position = static_cast<uint64_t>(batch.position(row));
    const bool mirrored =
        (info.num_flips == 2 || mirrors_pixels_) && draw_flip(options_, static_cast<int64_t>(position));
    const uint8_t flip = mirrored && info.num_flips == 2;
    const std::span id(&batch.sample_ids[row], 1);
    store_->read_mean(id, std::span(&flip, 1), x);
    if (mirrored && mirrors_pixels_) mirror_rows(x, batch.shape.lane.width);
    const auto shift = static_cast<float>(info.already_scaled ? 0 : info.shift_factor);
    const auto scale = static_cast<float>(info.already_scaled ? 1 : info.scaling_factor);
    if (info.has_logvar && options_.draw_posterior) {
      scratch.logvar.resize(x.size());
      scratch.epsilon.resize(x.size());
      store_->read_logvar(id, std::span(&flip, 1), scratch.logvar);
      philox_normal(options_.seed, Draw::kPosterior, position, scratch.epsilon);
      draw_posterior(x, scratch.logvar, scratch.epsilon, shift, scale);
    } else if (shift != 0 || scale != 1) {
      scale_latents(x, shift, scale);
    }
  }

  // Writes the caption of each row. Dropped captions are marked or empty.
  void fill_text(Batch& batch) const {
    const CaptionChoice choice = choose_captions(*text_, options_, batch);
    std::vector<int64_t> rows;
    for (const int64_t entry : choice.entries) rows.push_back(text_->num_rows(entry));
    text_->prefetch(choice.entries);
    shape_text(rows, batch);
    batch.text_dropped = choice.dropped;
    std::byte* to = batch.text_rows.data();
    for (const int64_t entry : choice.entries) to = std::ranges::copy(text_->rows(entry), to).out;
  }

  // A sample without a label counts as dropped.
  int64_t label(int64_t id) const {
    const int64_t label = store_->label(id);
    if (label >= 0) return label;
    if (options_.null_class >= 0) return options_.null_class;
    fail("loader", "sample {:?} has no label, and the model has no class for that: label it or leave it out",
         store_->sample_name(id));
  }

  std::shared_ptr<FeatureStore> store_;
  std::shared_ptr<const TextStore> text_;
  BatchOptions options_;
  DataShape shape_;
  SampleOrder order_;
  bool mirrors_pixels_;
};

// Writes numbers as `dtype` and returns where they end.
std::byte* append_as(Dtype dtype, std::span<const float> numbers, std::byte* to) {
  if (dtype == Dtype::kF32) return std::ranges::copy(std::as_bytes(numbers), to).out;
  for (const float number : numbers) {
    const uint16_t bits = dtype == Dtype::kBF16 ? float_to_bf16(number) : float_to_fp16(number);
    std::memcpy(to, &bits, sizeof bits);
    to += sizeof bits;
  }
  return to;
}

struct SyntheticFill {
  DataShape shape;
  BatchOptions options;
  SampleOrder order;

  void operator()(int64_t first_position, Batch& batch) const {
    const Lane& lane = shape.lanes[static_cast<size_t>(order.batch_at(first_position).lane)];
    shape_batch(options, first_position, shape, lane, batch);
    const int64_t latent_size = batch.shape.sample_elements();
    if (shape.text.width > 0) fill_text(batch);
    for (int64_t row = 0; row < batch.size(); ++row) {
      if (shape.has_image_size) {
        batch.image_hw[2 * row] = static_cast<float>(lane.height);
        batch.image_hw[2 * row + 1] = static_cast<float>(lane.width);
        batch.aspect_ratio[row] = static_cast<float>(lane.height) / static_cast<float>(lane.width);
      }
      if (shape.num_classes > 0) {
        const auto position = static_cast<uint64_t>(batch.position(row));
        batch.class_labels[row] = static_cast<int64_t>(
            philox_uniform(options.seed, Draw::kShuffle, position) * static_cast<double>(shape.num_classes));
      }
    }
    for (int64_t row = 0; row < batch.size_with_halo(); ++row) {
      batch.sample_ids[row] = order.sample_at(batch.position(row));
      philox_normal(options.seed, Draw::kPosterior, static_cast<uint64_t>(batch.position(row)),
                    std::span(batch.x_0).subspan(row * latent_size, latent_size));
      draw_common(options, row, std::span(batch.noise).subspan(row * latent_size, latent_size), batch);
    }
  }

  // Draws captions of 1 to max_rows rows, or of max_rows if captions are padded.
  void fill_text(Batch& batch) const {
    const TextShape& text = shape.text;
    std::vector<int64_t> rows;
    for (int64_t row = 0; row < batch.size(); ++row) {
      const auto position = static_cast<uint64_t>(batch.first_position + row);
      const double u = philox_uniform(options.seed, Draw::kCaption, position);
      rows.push_back(text.is_padded ? text.max_rows
                                    : 1 + static_cast<int64_t>(u * static_cast<double>(text.max_rows)));
    }
    shape_text(rows, batch);
    std::vector<float> features;
    std::byte* to = batch.text_rows.data();
    for (int64_t row = 0; row < batch.size(); ++row) {
      const int64_t position = batch.first_position + row;
      features.resize(static_cast<size_t>(rows[row] * text.width));
      philox_normal(options.seed, Draw::kCaption, static_cast<uint64_t>(position), features);
      to = append_as(text.dtype, features, to);
      batch.text_dropped[row] = options.has_null_text && draws_text_drop(options, position);
    }
  }
};

}  // namespace

DataShape store_shape(const StoreInfo& info) {
  return {.channels = info.channels,
          .num_classes = static_cast<int64_t>(info.class_names.size()),
          .lanes = info.lanes,
          .has_image_size = info.has_image_size};
}

TextShape text_shape(const TextStore& store) {
  const TextStoreInfo& info = store.info();
  int64_t num_captions = 0, num_rows = 0;
  for (int64_t sample = 0; sample < info.num_samples; ++sample)
    for (const int64_t entry : store.entries(sample)) {
      num_rows += store.num_rows(entry);
      ++num_captions;
    }
  return {
      .width = info.width,
      .max_rows = info.max_tokens,
      .mean_rows = static_cast<double>(num_rows) / static_cast<double>(std::max<int64_t>(num_captions, 1)),
      .is_padded = info.padded,
      .dtype = info.dtype};
}

std::unique_ptr<BatchSource> store_batches(std::shared_ptr<FeatureStore> store, const BatchOptions& options,
                                           std::shared_ptr<const TextStore> text) {
  check_batch_options(options);
  StoreFill fill(std::move(store), std::move(text), options);
  const SampleOrder order = fill.order();
  return std::make_unique<PrefetchedBatches>(std::move(fill), order, options);
}

std::unique_ptr<BatchSource> synthetic_batches(const DataShape& shape, const BatchOptions& options) {
  check_batch_options(options);
  for (const Lane& lane : shape.lanes)
    if (shape.channels < 1 || lane.height < 1 || lane.width < 1)
      fail("loader", "expected positive sizes of synthetic latents, got {} x {} x {}", shape.channels,
           lane.height, lane.width);
  const SampleOrder order(options.seed, {}, options.global_batch, static_cast<int64_t>(shape.lanes.size()));
  return std::make_unique<PrefetchedBatches>(SyntheticFill{shape, options, order}, order, options);
}

}  // namespace kiln
