#include "data/loader/batches.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/philox.h"
#include "data/loader/batch_draws.h"
#include "data/loader/prefetched_batches.h"
#include "data/store/latent_kernels.h"

namespace kiln {
namespace {

class StoreFill {
 public:
  StoreFill(std::shared_ptr<FeatureStore> store, const BatchOptions& options)
      : store_(std::move(store)),
        options_(options),
        shape_(store_shape(store_->info())),
        order_(options.seed, store_->info().sample_lanes(), options.global_batch),
        mirrors_pixels_(options.flip && store_->info().autoencoder == "pixels" &&
                        store_->info().num_flips == 1) {}

  void operator()(int64_t first_position, Batch& batch) const {
    const Lane& lane = shape_.lanes[static_cast<size_t>(order_.batch_at(first_position).lane)];
    shape_batch(options_, first_position, shape_, lane, batch);
    for (int64_t row = 0; row < batch.size(); ++row)
      batch.sample_ids[row] = order_.sample_at(batch.first_position + row);
    store_->prefetch(batch.sample_ids);
    const int64_t latent_size = batch.shape.sample_elements();
    Scratch scratch;
    for (int64_t row = 0; row < batch.size(); ++row) {
      fill_latent(batch, row, std::span(batch.x_0).subspan(row * latent_size, latent_size), scratch);
      if (!batch.class_labels.empty()) batch.class_labels[row] = label(batch.sample_ids[row]);
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
    const auto position = static_cast<uint64_t>(batch.first_position + row);
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

  // A sample without a label counts as dropped.
  int64_t label(int64_t id) const {
    const int64_t label = store_->label(id);
    if (label >= 0) return label;
    if (options_.null_class >= 0) return options_.null_class;
    fail("loader", "sample {:?} has no label, and the model no class for that", store_->sample_name(id));
  }

  std::shared_ptr<FeatureStore> store_;
  BatchOptions options_;
  DataShape shape_;
  SampleOrder order_;
  bool mirrors_pixels_;
};

struct SyntheticFill {
  DataShape shape;
  BatchOptions options;
  SampleOrder order;

  void operator()(int64_t first_position, Batch& batch) const {
    const Lane& lane = shape.lanes[static_cast<size_t>(order.batch_at(first_position).lane)];
    shape_batch(options, first_position, shape, lane, batch);
    const int64_t latent_size = batch.shape.sample_elements();
    for (int64_t row = 0; row < batch.size(); ++row) {
      const auto position = static_cast<uint64_t>(batch.first_position + row);
      batch.sample_ids[row] = order.sample_at(batch.first_position + row);
      philox_normal(options.seed, Draw::kPosterior, position,
                    std::span(batch.x_0).subspan(row * latent_size, latent_size));
      if (shape.num_classes > 0) {
        batch.class_labels[row] = static_cast<int64_t>(
            philox_uniform(options.seed, Draw::kShuffle, position) * static_cast<double>(shape.num_classes));
      }
      draw_common(options, row, std::span(batch.noise).subspan(row * latent_size, latent_size), batch);
    }
  }
};

}  // namespace

DataShape store_shape(const StoreInfo& info) {
  return {.channels = info.channels,
          .num_classes = static_cast<int64_t>(info.class_names.size()),
          .lanes = info.lanes};
}

std::unique_ptr<BatchSource> store_batches(std::shared_ptr<FeatureStore> store, const BatchOptions& options) {
  check_batch_options(options);
  StoreFill fill(std::move(store), options);
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
