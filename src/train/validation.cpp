#include "train/validation.h"

#include <algorithm>
#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "parallel/device_wait.h"
#include "train/average_in_place.h"
#include "train/forward_pass.h"

namespace kiln {

namespace {

int64_t share(int64_t images, int64_t world_size) { return (images + world_size - 1) / world_size; }

}  // namespace

Validation::Validation(const TrainOptions& options, const TrainingData& data, at::Device device)
    : options_(options),
      data_(open_validation_data(options, data, device)),
      num_images_(options.validation_images > 0 ? options.validation_images : data_.num_samples),
      seed_(validation_seed(options.seed)) {
  if (num_images_ > data_.num_samples)
    fail("train", "--validation-images {} is more than the {} of --validation-data {}", num_images_,
         data_.num_samples, options.validation_data);
}

std::string Validation::weights() const {
  return options_.ema_decay.empty() ? "model" : fmt::format("ema-{}", options_.ema_decay.front());
}

std::optional<std::vector<double>> Validation::losses(const Training& training, at::Device device,
                                                      const std::function<bool()>& stop) const {
  ProcessGroup& group = training.state->zero->group();
  const DenoiserShape& shape = training.denoiser->shape();
  const int64_t world_size = group.world_size();
  const int64_t at_once =
      world_size * std::min(rows_of_validation(options_, world_size), share(num_images_, world_size));
  const std::unique_ptr<BatchSource> batches =
      data_.batches({.seed = seed_,
                     .global_batch = at_once,
                     .rank = group.rank(),
                     .world_size = world_size,
                     .null_class = shape.has_null_class ? shape.num_classes : -1,
                     .draw_posterior = options_.draw_posterior,
                     .flip = options_.flip,
                     .num_threads = static_cast<int>(options_.loader_threads),
                     .prefetch = options_.prefetch});
  std::vector<double> losses(static_cast<size_t>(num_images_));
  for (int64_t first = 0; first < num_images_; first += at_once) {
    if (group.sum({stop() ? 1.0 : 0.0}, "a stop signal").front() > 0) return std::nullopt;
    const std::shared_ptr<const Batch> batch = batches->next();
    const at::Tensor rows =
        forward_losses(training, slice_rows(as_tensors(*batch, *training.objective), 0, batch->size, device));
    wait_for_device(device, group, "a validation");
    const at::Tensor host = rows.to(at::kCPU, at::kDouble).contiguous();
    // The last batch goes on into the next epoch: those rows are walked, since others wait, and left out.
    const int64_t kept = std::min(num_images_ - batch->first_position, batch->size);
    if (kept > 0) std::copy_n(host.const_data_ptr<double>(), kept, losses.begin() + batch->first_position);
  }
  return group.sum(std::move(losses), "the validation losses");
}

std::optional<ValidationLoss> Validation::run(const Training& training, at::Device device,
                                              const std::function<bool()>& stop) const {
  std::optional<std::vector<double>> all;
  with_first_ema(*training.state, [&] { all = losses(training, device, stop); });
  if (!all) return std::nullopt;

  const std::vector<double> positions = positions_at(*training.objective, seed_, 0, num_images_);
  ValidationLoss result{.num_images = num_images_};
  std::array<double, 4> counts{};
  for (size_t i = 0; i < all->size(); ++i) {
    const double loss = (*all)[i];
    const auto quartile = static_cast<size_t>(std::clamp(static_cast<int>(positions[i] * 4), 0, 3));
    result.loss += loss / static_cast<double>(num_images_);
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
  const at::Tensor prediction = forward_pass(*training.denoiser, *training.state->zero,
                                             {.x_t = noised.x_t,
                                              .timesteps = noised.model_t,
                                              .class_labels = batch.class_labels,
                                              .text_embeds = batch.text_embeds,
                                              .text_mask = batch.text_mask});
  return training.objective->loss(prediction, batch.x_0, batch.noise, noised).loss;
}

}  // namespace kiln
