#include "train/validation.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "core/aten.h"
#include "core/error.h"
#include "parallel/offload/device_wait.h"
#include "step/forward_pass.h"

namespace kiln {

namespace {

// Returns the name of the samples in messages.
std::string name_of_samples(const TrainOptions& options) {
  return options.validation.share > 0 ? fmt::format("--validation-share {:g}", options.validation.share)
                                      : "--validation-data " + options.validation.data;
}

int64_t sum_of(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// Divides `images` among the lanes in proportion to their samples, by the largest remainders.
std::vector<int64_t> shares_of_lanes(const std::vector<int64_t>& samples, int64_t images) {
  const int64_t all = sum_of(samples);
  std::vector<int64_t> shares;
  std::vector<size_t> by_remainder;
  for (size_t lane = 0; lane < samples.size(); ++lane) {
    shares.push_back(images * samples[lane] / all);
    by_remainder.push_back(lane);
  }
  std::stable_sort(by_remainder.begin(), by_remainder.end(),
                   [&](size_t a, size_t b) { return images * samples[a] % all > images * samples[b] % all; });
  for (size_t i = 0; sum_of(shares) < images; ++i) ++shares[by_remainder[i]];
  return shares;
}

}  // namespace

Validation::Validation(const TrainOptions& options, const TrainingData& data, at::Device device)
    : options_(options),
      data_(open_validation_data(options, data, device)),
      seed_(validation_seed(options.seed)) {
  const int64_t num_samples = sum_of(data_.samples_of_lane);
  if (num_samples == 0) fail("train", "{} is empty", name_of_samples(options));
  if (options.validation.images > num_samples)
    fail("train", "--validation-images {} is more than the {} samples of {}", options.validation.images,
         num_samples, name_of_samples(options));
  images_of_lane_ = options.validation.images > 0
                        ? shares_of_lanes(data_.samples_of_lane, options.validation.images)
                        : data_.samples_of_lane;
}

std::string Validation::weights() const {
  return options_.ema.decays.empty() ? "model" : fmt::format("ema-{}", options_.ema.decays.front());
}

std::optional<Validation::Losses> Validation::losses_of(int64_t lane, const Training& training,
                                                        at::Device device,
                                                        const std::function<bool()>& stop) const {
  ProcessGroup& group = training.state->zero->group();
  const ConditioningShape& shape = training.denoiser->shape().conditioning;
  const int64_t world_size = group.world_size(), num_images = images_of_lane_[static_cast<size_t>(lane)];
  const int64_t at_once = world_size * rows_of_validation(options_, num_images, world_size);
  // Lanes have different draws at the same position.
  const uint64_t seed = seed_ + static_cast<uint64_t>(lane) * 0x9e3779b97f4a7c15;
  BatchOptions batch_options = {.seed = seed,
                                .global_batch = at_once,
                                .rank = group.rank(),
                                .world_size = world_size,
                                .null_class = shape.has_null_class ? shape.num_classes : -1,
                                .has_null_text = shape.has_null_text,
                                .draw_posterior = options_.data.draw_posterior,
                                .flip = options_.data.flip,
                                .num_threads = static_cast<int>(options_.data.loader_threads),
                                .prefetch = options_.data.prefetch};
  if (images_of_lane_.size() > 1) batch_options.only_lane = lane;
  const std::unique_ptr<BatchSource> batches = data_.batches(batch_options);
  std::vector<double> losses(static_cast<size_t>(num_images));
  for (int64_t first = 0; first < num_images; first += at_once) {
    if (group.sum({stop() ? 1.0 : 0.0}, "a stop signal").front() > 0) return std::nullopt;
    const std::shared_ptr<const Batch> batch = batches->next();
    const at::Tensor rows = forward_losses(
        training, slice_rows(as_tensors(*batch, *training.objective), 0, batch->size(), device));
    wait_for_device(device, group, "a validation");
    const at::Tensor host = rows.to(at::kCPU, at::kDouble).contiguous();
    // The last batch reaches into the next epoch. Those rows are walked, since other ranks wait, but not
    // counted.
    const int64_t kept = std::min(num_images - batch->first_position, batch->size());
    if (kept > 0) std::copy_n(host.const_data_ptr<double>(), kept, losses.begin() + batch->first_position);
  }
  return Losses{.losses = group.sum(std::move(losses), "the validation losses"),
                .positions = positions_at(*training.objective, seed, 0, num_images)};
}

std::optional<ValidationLoss> Validation::run(const Training& training, at::Device device,
                                              const std::function<bool()>& stop) const {
  Losses all;
  bool is_whole = true;
  with_first_ema(*training.state, [&] {
    for (size_t lane = 0; lane < images_of_lane_.size() && is_whole; ++lane) {
      if (images_of_lane_[lane] == 0) continue;
      const std::optional<Losses> found = losses_of(static_cast<int64_t>(lane), training, device, stop);
      is_whole = found.has_value();
      if (!found) continue;
      all.losses.insert(all.losses.end(), found->losses.begin(), found->losses.end());
      all.positions.insert(all.positions.end(), found->positions.begin(), found->positions.end());
    }
  });
  if (!is_whole) return std::nullopt;

  const auto num_images = static_cast<int64_t>(all.losses.size());
  ValidationLoss result{.num_images = num_images};
  std::array<double, 4> counts{};
  for (size_t i = 0; i < all.losses.size(); ++i) {
    const double loss = all.losses[i];
    const auto quartile = static_cast<size_t>(std::clamp(static_cast<int>(all.positions[i] * 4), 0, 3));
    result.loss += loss / static_cast<double>(num_images);
    result.quartiles[quartile] += loss;
    counts[quartile] += 1;
  }
  for (size_t q = 0; q < counts.size(); ++q) result.quartiles[q] /= counts[q];
  return result;
}

uint64_t validation_seed(uint64_t seed) { return seed ^ 0x9e3779b97f4a7c15; }

at::Tensor forward_losses(const Training& training, const StepBatch& batch) {
  const at::NoGradGuard no_grad;
  const NoisedBatch noised = training.objective->add_noise(batch.x_0, batch.noise, batch.timesteps);
  const at::Tensor prediction =
      forward_pass(*training.denoiser, *training.state->zero,
                   {.x_t = noised.x_t, .timesteps = noised.model_t, .conditioning = batch.conditioning});
  return training.objective->loss(prediction, batch.x_0, batch.noise, noised).loss;
}

}  // namespace kiln
