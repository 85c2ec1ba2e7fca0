#include "data/batches.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/philox.h"
#include "data/batch_draws.h"
#include "data/latent_kernels.h"
#include "data/prefetched_batches.h"

namespace kiln {
namespace {

class StoreFill {
 public:
  StoreFill(std::shared_ptr<FeatureStore> store, const BatchOptions& options)
      : store_(std::move(store)),
        options_(options),
        mirrors_pixels_(options.flip && store_->info().autoencoder == "pixels" &&
                        store_->info().num_flips == 1) {}

  void operator()(int64_t first_position, Batch& batch) const {
    const StoreInfo& info = store_->info();
    shape_batch(options_, first_position, info.channels, info.height, info.width, !info.class_names.empty(),
                batch);
    for (int64_t row = 0; row < batch.size; ++row) {
      batch.sample_ids[row] = sample_at(options_.seed, store_->size(), batch.first_position + row);
    }
    store_->prefetch(batch.sample_ids);
    const int64_t latent_size = info.latent_size();
    Scratch scratch;
    for (int64_t row = 0; row < batch.size; ++row) {
      fill_latent(batch, row, std::span(batch.x_0).subspan(row * latent_size, latent_size), scratch);
      if (!batch.class_labels.empty()) batch.class_labels[row] = label(batch.sample_ids[row]);
      draw_common(options_, row, std::span(batch.noise).subspan(row * latent_size, latent_size), batch);
    }
  }

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
    if (mirrored && mirrors_pixels_) mirror_rows(x, info.width);
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
  bool mirrors_pixels_;
};

struct SyntheticFill {
  int64_t channels, height, width, num_classes;
  BatchOptions options;

  void operator()(int64_t first_position, Batch& batch) const {
    shape_batch(options, first_position, channels, height, width, num_classes > 0, batch);
    const int64_t latent_size = channels * height * width;
    for (int64_t row = 0; row < batch.size; ++row) {
      const auto position = static_cast<uint64_t>(batch.first_position + row);
      batch.sample_ids[row] = batch.first_position + row;
      philox_normal(options.seed, Draw::kPosterior, position,
                    std::span(batch.x_0).subspan(row * latent_size, latent_size));
      if (num_classes > 0) {
        batch.class_labels[row] = static_cast<int64_t>(
            philox_uniform(options.seed, Draw::kShuffle, position) * static_cast<double>(num_classes));
      }
      draw_common(options, row, std::span(batch.noise).subspan(row * latent_size, latent_size), batch);
    }
  }
};

}  // namespace

std::unique_ptr<BatchSource> store_batches(std::shared_ptr<FeatureStore> store, const BatchOptions& options) {
  check_batch_options(options);
  const int64_t num_samples = store->size();
  return std::make_unique<PrefetchedBatches>(StoreFill(std::move(store), options), num_samples,
                                             options.global_batch, options.num_threads, options.prefetch);
}

std::unique_ptr<BatchSource> synthetic_batches(int64_t channels, int64_t height, int64_t width,
                                               int64_t num_classes, const BatchOptions& options) {
  check_batch_options(options);
  if (channels < 1 || height < 1 || width < 1) {
    fail("loader", "expected positive sizes of synthetic latents, got {} x {} x {}", channels, height, width);
  }
  return std::make_unique<PrefetchedBatches>(SyntheticFill{channels, height, width, num_classes, options},
                                             /*num_samples=*/0, options.global_batch, options.num_threads,
                                             options.prefetch);
}

}  // namespace kiln
