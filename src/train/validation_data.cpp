#include "train/validation_data.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"

namespace kiln {

namespace {

namespace fs = std::filesystem;

void check_latents(const TrainOptions& options, const StoreInfo& info, const TrainingData& data) {
  const std::string& path = options.validation_data;
  if (info.image_size != options.image_size)
    fail("train",
         "--validation-data {} is of {}-pixel images, --image-size is {}: extract it again with --image-size "
         "{}",
         path, info.image_size, options.image_size, options.image_size);
  if (info.autoencoder == data.autoencoder.name &&
      info.autoencoder_fingerprint == data.autoencoder.fingerprint && info.channels == data.shape.channels &&
      info.height == data.shape.height && info.width == data.shape.width)
    return;
  fail("train",
       "--validation-data {} was made by another autoencoder ({} {}, {} x {} x {} latents) than --data ({} "
       "{}, {} x {} x {}): extract it again with that of --data",
       path, info.autoencoder, info.autoencoder_fingerprint, info.channels, info.height, info.width,
       data.autoencoder.name, data.autoencoder.fingerprint, data.shape.channels, data.shape.height,
       data.shape.width);
}

void check_classes(const std::string& path, const std::vector<std::string>& names, const TrainingData& data) {
  if (names == data.class_names) return;
  const size_t common = std::min(names.size(), data.class_names.size());
  const auto differ =
      std::mismatch(names.begin(), names.begin() + static_cast<int64_t>(common), data.class_names.begin());
  const auto name_at = [](const std::vector<std::string>& all, int64_t index) {
    return index < static_cast<int64_t>(all.size()) ? all[static_cast<size_t>(index)] : "none";
  };
  const int64_t index = differ.first - names.begin();
  fail("train",
       "--validation-data {} has {} classes, --data has {}; number {} is '{}' there and '{}' here: make it "
       "from folders of the same names",
       path, names.size(), data.class_names.size(), index, name_at(names, index),
       name_at(data.class_names, index));
}

std::shared_ptr<const Autoencoder> encoder_of(const TrainOptions& options, const TrainingData& data,
                                              at::Device device) {
  if (data.autoencoder.name == "pixels") return load_autoencoder("pixels", device, at::kFloat);
  if (!data.decoder)
    fail("train",
         "--validation-data {} is not a feature store: run kiln extract, or give --autoencoder with that of "
         "--data, to encode its images at every validation",
         options.validation_data);
  return data.decoder;
}

ValidationData open_validation_store(const TrainOptions& options, const TrainingData& data) {
  const std::shared_ptr<FeatureStore> store = FeatureStore::open(options.validation_data);
  check_latents(options, store->info(), data);
  check_classes(options.validation_data, store->info().class_names, data);
  return {.num_samples = store->size(),
          .identity = store_identity(*store),
          .batches = [store](const BatchOptions& batch) { return store_batches(store, batch); }};
}

ValidationData open_validation_images(const TrainOptions& options, const TrainingData& data,
                                      at::Device device) {
  EncodedImages encoded =
      encode_images(options, options.validation_data, encoder_of(options, data, device), device);
  check_classes(options.validation_data, encoded.images->class_names(), data);
  return {.num_samples = static_cast<int64_t>(encoded.images->records().size()),
          .identity = std::move(encoded.identity),
          .batches = std::move(encoded.batches)};
}

}  // namespace

ValidationData open_validation_data(const TrainOptions& options, const TrainingData& data,
                                    at::Device device) {
  const fs::path path = options.validation_data;
  if (options.data == "synthetic")
    fail("train", "--validation-data has nothing in common with --data synthetic: leave it out");
  if (!fs::exists(path))
    fail("train", "--validation-data {} does not exist: give a store made by kiln extract, or images",
         path.string());
  ValidationData opened = fs::exists(path / "store.json") ? open_validation_store(options, data)
                                                          : open_validation_images(options, data, device);
  if (opened.num_samples == 0) fail("train", "--validation-data {} is empty", path.string());
  return opened;
}

}  // namespace kiln
