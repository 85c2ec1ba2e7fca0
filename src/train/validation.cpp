#include "train/validation.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/aten.h"
#include "core/error.h"
#include "train/average_in_place.h"
#include "train/forward_pass.h"

namespace kiln {

namespace {

void check_fits(const TrainOptions& options, const StoreInfo& info, const TrainingData& data) {
  const std::string& path = options.validation_data;
  if (info.image_size != options.image_size)
    fail("train",
         "--validation-data {} is of {}-pixel images, --image-size is {}: extract it again with --image-size "
         "{}",
         path, info.image_size, options.image_size, options.image_size);
  if (info.autoencoder != data.autoencoder.name ||
      info.autoencoder_fingerprint != data.autoencoder.fingerprint || info.channels != data.shape.channels ||
      info.height != data.shape.height || info.width != data.shape.width)
    fail("train",
         "--validation-data {} was made by another autoencoder ({} {}, {} x {} x {} latents) than --data ({} "
         "{}, "
         "{} x {} x {}): extract it again with that of --data",
         path, info.autoencoder, info.autoencoder_fingerprint, info.channels, info.height, info.width,
         data.autoencoder.name, data.autoencoder.fingerprint, data.shape.channels, data.shape.height,
         data.shape.width);
  if (info.class_names == data.class_names) return;
  const size_t common = std::min(info.class_names.size(), data.class_names.size());
  const auto differ =
      std::mismatch(info.class_names.begin(), info.class_names.begin() + static_cast<int64_t>(common),
                    data.class_names.begin());
  const auto name_at = [](const std::vector<std::string>& names, int64_t index) {
    return index < static_cast<int64_t>(names.size()) ? names[static_cast<size_t>(index)] : "none";
  };
  const int64_t index = differ.first - info.class_names.begin();
  fail(
      "train",
      "--validation-data {} has {} classes, --data has {}; number {} is '{}' there and '{}' here: extract it "
      "from folders of the same names",
      path, info.class_names.size(), data.class_names.size(), index, name_at(info.class_names, index),
      name_at(data.class_names, index));
}

int64_t share(int64_t images, int64_t world_size) { return (images + world_size - 1) / world_size; }

}  // namespace

Validation::Validation(const TrainOptions& options, const TrainingData& data)
    : options_(options), seed_(validation_seed(options.seed)) {
  const std::string& path = options.validation_data;
  if (options.data == "synthetic")
    fail("train", "--validation-data has nothing in common with --data synthetic: leave it out");
  if (!std::filesystem::exists(std::filesystem::path(path) / "store.json"))
    fail("train", "--validation-data expects a feature store made by kiln extract, got {}", path);
  store_ = FeatureStore::open(path);
  check_fits(options, store_->info(), data);
  num_images_ = options.validation_images > 0 ? options.validation_images : store_->size();
  if (store_->size() == 0) fail("train", "the store {} of --validation-data is empty", path);
  if (num_images_ > store_->size())
    fail("train", "--validation-images {} is more than the {} of --validation-data {}", num_images_,
         store_->size(), path);
  identity_ = store_identity(*store_);
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
      world_size * std::min(rows_of_walk(options_, world_size), share(num_images_, world_size));
  const std::unique_ptr<BatchSource> batches =
      store_batches(store_, {.seed = seed_,
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

  std::vector<double> time_uniform(all->size());
  for (size_t i = 0; i < time_uniform.size(); ++i)
    time_uniform[i] = time_uniform_at(seed_, static_cast<int64_t>(i));
  const at::Tensor positions = training.objective
                                   ->position(training.objective->timesteps(
                                       at::from_blob(time_uniform.data(), {num_images_}, at::kDouble)))
                                   .to(at::kDouble)
                                   .contiguous();
  ValidationLoss result{.num_images = num_images_};
  std::array<double, 4> counts{};
  for (size_t i = 0; i < all->size(); ++i) {
    const double loss = (*all)[i];
    const double position = positions.const_data_ptr<double>()[i];
    const auto quartile = static_cast<size_t>(std::clamp(static_cast<int>(position * 4), 0, 3));
    result.loss += loss / static_cast<double>(num_images_);
    result.quartiles[quartile] += loss;
    counts[quartile] += 1;
  }
  for (size_t q = 0; q < counts.size(); ++q) result.quartiles[q] /= counts[q];
  return result;
}

uint64_t validation_seed(uint64_t seed) { return seed ^ 0x9e3779b97f4a7c15; }

int64_t rows_of_walk(const TrainOptions& options, int64_t world_size) {
  const int64_t most = share(options.global_batch, world_size);
  return options.micro_batch > 0 ? std::min(options.micro_batch, most) : most;
}

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
