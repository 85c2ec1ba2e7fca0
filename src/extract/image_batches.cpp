#include "extract/image_batches.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <utility>

#include "core/aten.h"
#include "core/error.h"
#include "core/philox.h"
#include "data/loader/batch_draws.h"
#include "data/loader/prefetched_batches.h"
#include "data/store/latent_kernels.h"
#include "parallel/offload/host_copy.h"

namespace kiln {
namespace {

// Fills batches that are not encoded yet: x_0 holds the images (B, 3, H, W), text_rows the captions' ids
// (i64). All else is as the step sees it.
struct ImageFill {
  Pictures pictures;
  std::shared_ptr<const EncodedText> text;  // null: none
  DataShape shape;                          // of the latents
  BatchOptions options;
  SampleOrder order;

  void operator()(int64_t first_position, Batch& batch) const {
    const int64_t lane = options.only_lane.value_or(order.batch_at(first_position).lane);
    shape_batch(options, first_position, shape, shape.lanes[static_cast<size_t>(lane)], batch);
    const PictureLanes::Shape& size = pictures.lanes->shapes()[static_cast<size_t>(lane)];
    const int64_t image_values = 3 * size.height * size.width, latent_values = batch.shape.sample_elements();
    batch.x_0.resize(batch.size_with_halo() * image_values);
    for (int64_t row = 0; row < batch.size_with_halo(); ++row) {
      const int64_t position = batch.position(row);
      const auto [sample, image] = load(position, lane);
      batch.sample_ids[row] = sample;
      const bool is_seen = row < batch.size();
      if (is_seen && batch.shape.has_labels)
        batch.class_labels[row] = pictures.images->records()[sample].label;
      if (is_seen && shape.has_image_size) fill_image_size(pictures.lanes->image_hw(sample), row, batch);
      write_image_values(image, draw_flip(options, position),
                         std::span(batch.x_0).subspan(row * image_values, image_values));
      draw_common(options, row, std::span(batch.noise).subspan(row * latent_values, latent_values), batch);
    }
    if (text) fill_tokens(batch);
  }

  void fill_tokens(Batch& batch) const {
    const CaptionChoice choice = choose_captions(*text, options, batch);
    std::vector<int64_t> ids, rows;
    for (const int64_t entry : choice.entries) {
      const text::TokenIds own = text->tokens(entry);
      ids.insert(ids.end(), own.begin(), own.end());
      rows.push_back(static_cast<int64_t>(own.size()));
    }
    shape_text(rows, batch);
    batch.text_dropped = choice.dropped;
    const std::span<const std::byte> bytes = std::as_bytes(std::span(ids));
    batch.text_rows.assign(bytes.begin(), bytes.end());
  }

  // Returns the sample that stands at a position, and its picture. Which one that is depends on the order and
  // on the files alone, so all ranks and threads find the same.
  std::pair<int64_t, Image> load(int64_t position, int64_t lane) const {
    for (int64_t further = 0; further <= order.samples_per_epoch(); ++further) {
      const int64_t sample = order.sample_at(position, further);
      try {
        return {sample, pictures.lanes->load(sample, lane)};
      } catch (const BrokenPicture& error) {
        pictures.images->leave_out(sample, message_of(error));
      }
    }
    fail("loader", "no picture of a shape can be decoded any more, the first: {}",
         pictures.images->all_left_out().front().why);
  }
};

class ImageBatches : public BatchSource {
 public:
  ImageBatches(const ImageFill& fill, std::shared_ptr<const Autoencoder> autoencoder, at::Device device,
               int64_t images_at_once)
      : options_(fill.options),
        images_at_once_(images_at_once),
        autoencoder_(std::move(autoencoder)),
        text_(fill.text),
        device_(device),
        images_(fill, fill.order, fill.options) {}

  std::shared_ptr<const Batch> next() override {
    std::shared_ptr<const Batch> images = images_.next();
    const bool are_pixels = autoencoder_->name == "pixels";
    if (are_pixels && !text_) return images;
    auto batch = std::make_shared<Batch>(*images);
    if (!are_pixels) seconds_.pictures += seconds_of([&] { encode(*images, *batch); });
    if (text_) seconds_.captions += seconds_of([&] { encode_text(*images, *batch); });
    return batch;
  }
  void seek(int64_t images_seen) override { images_.seek(images_seen); }
  const SampleOrder& order() const override { return images_.order(); }
  double take_stall_seconds() override { return images_.take_stall_seconds(); }
  EncodingSeconds take_encoding_seconds() override { return std::exchange(seconds_, {}); }
  int64_t ready() const override { return images_.ready(); }

 private:
  // Returns the seconds that `work` takes. REQUIRES: it waits for the device.
  template <class Work>
  static double seconds_of(Work&& work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  void encode_text(const Batch& images, Batch& batch) const {
    const auto num_ids = static_cast<size_t>(batch.shape.text_rows);
    text::TokenIds ids(num_ids);
    std::memcpy(ids.data(), images.text_rows.data(), num_ids * sizeof(int64_t));
    batch.text_rows.resize(num_ids * static_cast<size_t>(batch.shape.text_width) *
                           dtype_size(batch.shape.text_dtype));
    text_->encode(ids, batch.text_offsets, batch.text_dropped, batch.text_rows);
  }

  void encode(const Batch& images, Batch& batch) const {
    const at::NoGradGuard no_grad;
    const int64_t num_images = images.size_with_halo();
    batch.x_0.resize(num_images * batch.shape.sample_elements());
    const Lane& lane = batch.shape.lane;
    const at::Tensor pixels = at::from_blob(
        const_cast<float*>(images.x_0.data()),
        {num_images, 3, lane.height * autoencoder_->downsample, lane.width * autoencoder_->downsample},
        at::kFloat);
    const int64_t most = images_at_once_ > 0 ? images_at_once_ : images.size();
    HostRead previous;  // while a GPU encodes some images, the host draws from the moments of those before
    for (int64_t first = 0; first < num_images; first += most) {
      HostRead moments = encode_some(pixels.narrow(0, first, std::min(most, num_images - first)));
      if (previous.is_pending()) draw_latents(previous.wait(), first - most, batch);
      previous = std::move(moments);
    }
    if (previous.is_pending()) draw_latents(previous.wait(), (num_images - 1) / most * most, batch);
  }

  HostRead encode_some(const at::Tensor& pixels) const {
    const at::Tensor staged = device_.is_cpu() ? pixels : host_empty(pixels.sizes(), at::kFloat, device_);
    if (!device_.is_cpu()) staged.copy_(pixels);
    return HostRead(autoencoder_->encode(sent_to(staged, device_)).to(at::kFloat).contiguous());
  }

  // Writes x_0 of the batch's rows from `first_row` on. `moments` are (n, 2z, h, w), or raw latents (n, z, h,
  // w) if there is no posterior.
  void draw_latents(const at::Tensor& moments, int64_t first_row, Batch& batch) const {
    const int64_t latent_values = batch.shape.sample_elements();
    const std::span<const float> all(moments.const_data_ptr<float>(), moments.numel());
    std::vector<float> epsilon(latent_values);
    const int64_t image_values = moments.numel() / moments.size(0);
    for (int64_t i = 0; i < moments.size(0); ++i) {
      const int64_t row = first_row + i;
      const auto mean = all.subspan(i * image_values, latent_values);
      const auto logvar = all.subspan(i * image_values + latent_values, image_values - latent_values);
      const auto x = std::span(batch.x_0).subspan(row * latent_values, latent_values);
      std::copy(mean.begin(), mean.end(), x.begin());
      to_latents(x, logvar, epsilon, batch.position(row));
    }
  }

  void to_latents(std::span<float> x, std::span<const float> logvar, std::span<float> epsilon,
                  int64_t position) const {
    const auto shift = static_cast<float>(autoencoder_->shift_factor);
    const auto scale = static_cast<float>(autoencoder_->scaling_factor);
    if (!options_.draw_posterior || logvar.empty()) return scale_latents(x, shift, scale);
    philox_normal(options_.seed, Draw::kPosterior, static_cast<uint64_t>(position), epsilon);
    draw_posterior(x, logvar, epsilon, shift, scale);
  }

  const BatchOptions options_;
  const int64_t images_at_once_;
  const std::shared_ptr<const Autoencoder> autoencoder_;
  const std::shared_ptr<const EncodedText> text_;
  const at::Device device_;
  PrefetchedBatches images_;
  EncodingSeconds seconds_;
};

}  // namespace

std::unique_ptr<BatchSource> image_batches(const Pictures& pictures,
                                           std::shared_ptr<const Autoencoder> autoencoder, at::Device device,
                                           const BatchOptions& options, int64_t images_at_once,
                                           std::shared_ptr<const EncodedText> text) {
  check_batch_options(options);
  DataShape shape{.channels = autoencoder->latent_channels,
                  .num_classes = static_cast<int64_t>(pictures.images->class_names().size()),
                  .lanes = pictures.lanes->latent_lanes(),
                  .has_image_size = pictures.lanes->has_buckets()};
  if (text) shape.text = {.width = text->info().width, .dtype = text->info().dtype};
  const SampleOrder order(options.seed, chosen_lanes(pictures.lanes->sample_lanes(), options),
                          options.global_batch, 1, options.begin);
  const ImageFill fill{pictures, std::move(text), shape, options, order};
  return std::make_unique<ImageBatches>(fill, std::move(autoencoder), device, images_at_once);
}

void rehearse_encoding(const Autoencoder& autoencoder, const Lane& lane, int64_t pictures,
                       at::Device device) {
  const at::NoGradGuard no_grad;
  const std::array<int64_t, 4> sizes = {pictures, 3, lane.height * autoencoder.downsample,
                                        lane.width * autoencoder.downsample};
  std::vector<float> pixels(static_cast<size_t>(sizes[0] * sizes[1] * sizes[2] * sizes[3]));
  autoencoder.encode(at::from_blob(pixels.data(), sizes, at::kFloat).to(device)).to(at::kFloat);
}

}  // namespace kiln
