#include "train/validation.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/aten.h"
#include "core/error.h"
#include "parallel/offload/device_wait.h"
#include "step/forward_pass.h"

namespace kiln {

namespace {

// Throws Error unless the autoencoder of --data made the latents.
void check_latents(const TrainOptions& options, const StoreInfo& info, const TrainingData& data) {
  const ModelRecord::AutoencoderInfo& made_by = data.autoencoder_info;
  if (info.autoencoder == made_by.name && info.autoencoder_fingerprint == made_by.fingerprint &&
      info.channels == data.shape.channels && (info.lanes == data.shape.lanes || data.shape.lanes.size() > 1))
    return;
  fail("train",
       "--validation-data {} was made by another autoencoder ({} {}, {} x {} latents) than --data ({} "
       "{}, {} x {}): extract it again with the autoencoder of --data",
       options.validation.data, info.autoencoder, info.autoencoder_fingerprint, info.channels,
       lanes_text(info.lanes), made_by.name, made_by.fingerprint, data.shape.channels,
       lanes_text(data.shape.lanes));
}

// Throws Error unless the encoder of --data's captions made the captions.
void check_captions(const TrainOptions& options, const TextStoreInfo& ours, const TextStoreInfo& theirs) {
  if (ours.encoder_fingerprint != theirs.encoder_fingerprint ||
      ours.tokenizer_fingerprint != theirs.tokenizer_fingerprint || ours.max_tokens != theirs.max_tokens ||
      ours.instruction != theirs.instruction)
    fail("train",
         "the captions of --validation-data {} were made by another text encoder or after another "
         "instruction ({} {}, up to {} tokens) than those of --data ({} {}, up to {}): extract them again "
         "with the settings of --data",
         options.validation.data, ours.encoder, ours.encoder_fingerprint, ours.max_tokens, theirs.encoder,
         theirs.encoder_fingerprint, theirs.max_tokens);
}

// Returns the name of the samples in messages.
std::string name_of_samples(const TrainOptions& options) {
  return options.validation.share > 0 ? fmt::format("--validation-share {:g}", options.validation.share)
                                      : "--validation-data " + options.validation.data;
}

std::string identity_of(const TrainOptions& options, const std::string& data) {
  return options.validation.share > 0 ? fmt::format("{:g} of {}", options.validation.share, data) : data;
}

int64_t sum_of(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

std::vector<int64_t> sizes_of(const std::vector<SampleLane>& lanes) {
  std::vector<int64_t> sizes;
  sizes.reserve(lanes.size());
  for (const SampleLane& lane : lanes) sizes.push_back(lane.size());
  return sizes;
}

ValidationData open_validation_store(const TrainOptions& options, const TrainingData& data,
                                     const DataDescription& held_out) {
  check_latents(options, held_out.info, data);
  if (held_out.text) check_captions(options, held_out.text->info(), data.text->info());
  const auto& source = std::get<StoredData>(held_out.source);
  const std::shared_ptr<FeatureStore> store = open_sources(source.stores());
  check_text_samples(held_out.text_folders, *store);
  std::vector<SampleLane> lanes = split_of(options.validation.share, *store, Split::kHeldOut);
  if (lanes.empty()) lanes = store->sample_lanes();
  return {.samples_of_lane = sizes_of(lanes),
          .identity = identity_of(options, kiln::identity_of(source, held_out.text_folders)),
          .batches = [store, text = held_out.text, lanes](BatchOptions batch) {
            batch.lanes = lanes;
            return store_batches(store, batch, text);
          }};
}

ValidationData open_validation_images(const TrainOptions& options, const TrainingData& data,
                                      const DataDescription& held_out, at::Device device) {
  std::shared_ptr<const Autoencoder> autoencoder = data.decoder;
  if (!autoencoder) autoencoder = load_autoencoder("pixels", device, at::kFloat);
  const Pictures& pictures = held_out.pictures;
  EncodedImages encoded =
      encode_images(options, pictures, autoencoder, held_out.captions, device, Split::kHeldOut);
  const std::vector<SampleLane> lanes = split_of(options.validation.share, pictures, Split::kHeldOut);
  return {.samples_of_lane = sizes_of(lanes.empty() ? pictures.lanes->sample_lanes() : lanes),
          .identity = identity_of(options, encoded.identity),
          .batches = std::move(encoded.batches),
          .pictures = options.validation.share > 0 ? Pictures() : pictures};
}

ValidationData open_validation_data(const TrainOptions& options, const TrainingData& data,
                                    at::Device device) {
  const DataDescription held_out = describe_held_out(data, options.validation);
  ValidationData opened = reads_pictures(held_out.source)
                              ? open_validation_images(options, data, held_out, device)
                              : open_validation_store(options, data, held_out);
  if (sum_of(opened.samples_of_lane) == 0) fail("train", "{} is empty", name_of_samples(options));
  return opened;
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
