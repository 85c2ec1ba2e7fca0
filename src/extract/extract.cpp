#include "extract/extract.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/stop_signal.h"
#include "core/tensors.h"
#include "data/feature_store.h"
#include "data/image_dataset.h"
#include "extract/image_batches.h"
#include "extract/image_values.h"
#include "extract/progress.h"
#include "models/autoencoders/autoencoder.h"
#include "parallel/machine.h"

namespace kiln {
namespace {

// One machine's decoding threads feed one encoder. Several processes would write the same samples.
void check_alone() {
  const char* world_size = std::getenv("WORLD_SIZE");
  if (world_size && std::atoi(world_size) > 1)
    fail("extract", "expected one process, got WORLD_SIZE={}: start kiln extract without torchrun",
         world_size);
}

struct Settings {
  at::Device device = at::kCPU;
  at::ScalarType compute_dtype = at::kFloat;
  int64_t num_flips = 1;
  int64_t batch = 1;
  int num_workers = 1;
};

Settings resolve(const ExtractOptions& options) {
  if (options.flip != "none" && options.flip != "both")
    fail("extract", "--flip: expected none or both, got {}", options.flip);
  if (options.batch < 0 || options.workers < 0 || options.shard_size < 1)
    fail("extract", "--batch, --workers and --shard-size: expected positive numbers, got {}, {} and {}",
         options.batch, options.workers, options.shard_size);
  Settings settings;
  settings.device = parse_device(options.device);
  settings.compute_dtype = parse_compute_dtype(options.compute_dtype);
  settings.num_flips = options.flip == "both" ? 2 : 1;
  settings.batch = options.batch;
  if (settings.batch == 0) settings.batch = settings.device.is_cuda() ? 32 : 8;
  const int cores = std::max(static_cast<int>(std::thread::hardware_concurrency()), 1);
  settings.num_workers = static_cast<int>(options.workers);
  if (settings.num_workers == 0)
    settings.num_workers = settings.device.is_cuda() ? cores : std::max(cores / 2, 1);
  return settings;
}

Dtype parse_storage_dtype(const std::string& name) { return from_scalar_type(parse_compute_dtype(name)); }

StoreInfo make_store_info(const ExtractOptions& options, const Settings& settings,
                          const ImageDataset& dataset, const Autoencoder& autoencoder) {
  StoreInfo info;
  info.autoencoder = autoencoder.name;
  info.autoencoder_fingerprint = autoencoder.fingerprint;
  info.scaling_factor = autoencoder.scaling_factor;
  info.shift_factor = autoencoder.shift_factor;
  info.channels = autoencoder.latent_channels;
  info.height = info.width = options.image_size / autoencoder.downsample;
  info.image_size = options.image_size;
  info.has_logvar = autoencoder.name != "pixels";
  info.num_flips = settings.num_flips;
  info.dtype = parse_storage_dtype(options.dtype);
  info.class_names = dataset.class_names();
  // All that changes the bytes, so that a run which would continue with other settings is refused.
  info.source = {{"data", std::filesystem::absolute(options.data).lexically_normal().filename().string()},
                 {"layout", dataset.layout()},
                 {"num_images", dataset.records().size()},
                 {"images_xxh3", dataset_fingerprint(dataset)},
                 {"device", settings.device.is_cuda() ? "cuda" : "cpu"},
                 {"compute_dtype", options.compute_dtype},
                 {"batch", settings.batch}};
  return info;
}

// Where to go on: the samples before are in the store.
struct Position {
  int64_t next_image = 0;   // in the data set
  int64_t num_samples = 0;  // good images before it
  int64_t num_in_store =
      0;  // of them; the rest is encoded again, so that batches are those of an uninterrupted run
};

class Extraction {
 public:
  Extraction(const ExtractOptions& options)
      : options_(options),
        settings_(resolve(options)),
        dataset_(ImageDataset::open(options.data)),
        autoencoder_(load_autoencoder(options.autoencoder, settings_.device, settings_.compute_dtype)) {
    check_image_size(*autoencoder_, options.image_size);
    const StoreInfo info = make_store_info(options, settings_, *dataset_, *autoencoder_);
    latent_values_ = info.latent_size();
    writer_ = FeatureStoreWriter::open(options.out, info, options.shard_size);
  }

  void run() {
    if (read_store_info(options_.out).complete) {
      fmt::print("{} is complete with {} samples: nothing to do\n", options_.out, writer_->num_complete());
      return;
    }
    const auto total = static_cast<int64_t>(dataset_->records().size());
    position_ = find_position();
    num_skipped_ = position_.next_image - position_.num_samples;
    if (position_.num_in_store > 0)
      fmt::print(stderr, "{} holds {} samples: going on behind them\n", options_.out, position_.num_in_store);
    ProgressLine progress(position_.next_image, total);
    const StopSignal stop;
    ImagePipeline pipeline(*dataset_, position_.next_image, total, options_.image_size, settings_.num_workers,
                           2 * settings_.batch);
    int64_t done = position_.next_image;
    std::vector<PreparedImage> batch;
    for (PreparedImage image; !stop.requested() && pipeline.next(image);
         progress.update(done, num_skipped_)) {
      ++done;
      if (!image.error.empty()) {
        skip(image, progress);
        continue;
      }
      batch.push_back(std::move(image));
      if (static_cast<int64_t>(batch.size()) == settings_.batch) submit(batch);
    }
    if (stop.requested()) {
      write(take_encoded());
      progress.finish(done - static_cast<int64_t>(batch.size()), num_skipped_);
      fmt::print(stderr, "stopped: the same command continues\n");
      return;
    }
    submit(batch);
    write(take_encoded());
    writer_->finish();
    progress.finish(done, num_skipped_);
    report();
  }

 private:
  // Walks back from the last sample in the store to the beginning of its batch.
  Position find_position() const {
    const int64_t num_in_store = writer_->num_complete();
    if (num_in_store == 0) return {};
    const auto& records = dataset_->records();
    const auto last = std::find_if(records.begin(), records.end(), [&](const ImageRecord& record) {
      return record.name == writer_->last_name();
    });
    if (last == records.end())
      fail("extract", "the store's last sample {} is not in {}: choose another --out", writer_->last_name(),
           options_.data);
    Position position{last - records.begin() + 1, num_in_store, num_in_store};
    while (position.num_samples % settings_.batch != 0) {
      --position.next_image;
      if (is_good(position.next_image)) --position.num_samples;
    }
    return position;
  }

  bool is_good(int64_t index) const {
    try {
      load_cropped(*dataset_, index, options_.image_size);
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  void skip(const PreparedImage& image, ProgressLine& progress) {
    if (options_.strict) fail("extract", "{} (--strict)", image.error);
    ++num_skipped_;
    progress.clear();
    fmt::print(stderr, "skipped: {}\n", image.error);
  }

  // A batch that the device works on, or has finished.
  struct Encoded {
    std::vector<int64_t> images;  // in the data set
    at::Tensor moments;           // (flips * B, channels, h, w)
  };

  // Starts encoding the batch, empties it, and writes the batch before. While a GPU encodes, the host
  // decodes, fills the next batch and writes the last one.
  void submit(std::vector<PreparedImage>& batch) {
    if (batch.empty()) return;
    const at::Tensor images = to_tensor(batch);
    const Encoded previous = take_encoded();
    for (const PreparedImage& image : batch) encoded_.images.push_back(image.index);
    const at::NoGradGuard no_grad;
    encoded_.moments = autoencoder_->encode(images.to(settings_.device));
    batch.clear();
    write(previous);
  }

  // Waits for the device.
  Encoded take_encoded() {
    Encoded encoded = std::exchange(encoded_, {});
    if (encoded.moments.defined()) encoded.moments = encoded.moments.to(at::kCPU, at::kFloat).contiguous();
    return encoded;
  }

  void write(const Encoded& encoded) {
    if (encoded.images.empty()) return;
    const at::Tensor& moments = encoded.moments;
    const auto size = static_cast<int64_t>(encoded.images.size());
    const bool has_logvar = autoencoder_->name != "pixels";
    const float* values = moments.const_data_ptr<float>();
    const int64_t values_per_image = moments.numel() / moments.size(0);
    for (int64_t i = 0; i < size; ++i) {
      if (position_.num_samples++ < position_.num_in_store) continue;
      const ImageRecord& record = dataset_->records()[encoded.images[i]];
      FeatureStoreWriter::Sample sample{record.name, record.caption, record.label, {}, {}};
      for (int64_t flip = 0; flip < settings_.num_flips; ++flip) {
        const float* mean = values + (flip * size + i) * values_per_image;
        sample.mean.insert(sample.mean.end(), mean, mean + latent_values_);
        if (has_logvar)
          sample.logvar.insert(sample.logvar.end(), mean + latent_values_, mean + 2 * latent_values_);
      }
      writer_->add(sample);
    }
  }

  at::Tensor to_tensor(const std::vector<PreparedImage>& batch) const {
    const auto size = static_cast<int64_t>(batch.size());
    const int64_t side = options_.image_size, image_values = 3 * side * side;
    at::Tensor images = at::empty({settings_.num_flips * size, 3, side, side}, at::kFloat);
    const std::span<float> values(images.mutable_data_ptr<float>(), images.numel());
    for (int64_t flip = 0; flip < settings_.num_flips; ++flip)
      for (int64_t i = 0; i < size; ++i)
        write_image_values(batch[i].image, flip == 1,
                           values.subspan((flip * size + i) * image_values, image_values));
    return images;
  }

  void report() const {
    const size_t num_classes = dataset_->class_names().size();
    fmt::print("{} samples{} in {}\n", position_.num_samples,
               num_classes > 0 ? fmt::format(", {} classes,", num_classes) : "", options_.out);
    if (num_skipped_ > 0)
      fmt::print("{} of {} pictures are broken or smaller than {} pixels and were skipped\n", num_skipped_,
                 dataset_->records().size(), options_.image_size);
  }

  const ExtractOptions options_;
  const Settings settings_;
  const std::unique_ptr<ImageDataset> dataset_;
  const std::unique_ptr<Autoencoder> autoencoder_;
  std::unique_ptr<FeatureStoreWriter> writer_;
  int64_t latent_values_ = 0;
  Position position_;
  Encoded encoded_;
  int64_t num_skipped_ = 0;
};

}  // namespace

void extract(const ExtractOptions& options) {
  check_alone();
  Extraction(options).run();
}

}  // namespace kiln
