// What the samples of a run take on a disk, and how fast they come.
#include <fmt/format.h>

#include <cmath>
#include <filesystem>

#include "core/dtype.h"
#include "core/error.h"
#include "core/files/entries.h"
#include "core/files/file_system.h"
#include "core/units.h"
#include "data/images/image_dataset.h"
#include "plan/run/make_plan.h"
#include "train/dataset/store_data.h"

namespace kiln {

namespace {

namespace fs = std::filesystem;

constexpr int64_t kImageNetImages = 1'281'167;
// Normal draws, posterior included, of one loader thread (benchmarks/results/store_*): latent values per
// second.
constexpr double kLoaderValuesPerS = 107'000 * 4096.0;
constexpr int64_t kHeaders = 64;  // of pictures, which stand for the others
// Assumption where pictures are not here: JPEGs about as large and as dense as ImageNet's, or as large as
// --image-size needs.
constexpr double kShortSide = 400, kAspectRatio = 1.25, kBytesPerPixel = 0.55;

// What kiln extract writes text features in, unless it is told: fp16 or bf16.
constexpr int64_t kTextElementBytes = 2;

void count_samples(const PlanOptions& options, int64_t found, DataPlan& data) {
  data.num_samples = options.dataset_size > 0 ? options.dataset_size : found > 0 ? found : kImageNetImages;
}

double mean_area(const std::vector<Lane>& lanes) {
  double sum = 0;
  for (const Lane& lane : lanes) sum += static_cast<double>(lane.area());
  return sum / static_cast<double>(lanes.size());
}

// Returns the mean area of a store's latents, whose lanes hold different numbers of samples.
double mean_area(const StoreInfo& info) {
  double sum = 0, samples = 0;
  for (const StoreInfo::Shard& shard : info.shards) {
    const auto count = static_cast<double>(shard.num_samples);
    sum += count * static_cast<double>(info.lanes[static_cast<size_t>(shard.lane)].area());
    samples += count;
  }
  return samples > 0 ? sum / samples : mean_area(info.lanes);
}

// Returns the bytes of the files of features in text stores. Equal captions are stored once.
int64_t text_store_bytes(const std::vector<std::string>& folders) {
  int64_t bytes = 0;
  for (const std::string& folder : folders)
    for (const auto& entry : entries_of(folder))
      if (entry.path().extension() == ".safetensors") bytes += static_cast<int64_t>(entry.file_size());
  return bytes;
}

// Describes the features of a store: of the one that is named, or as kiln extract would write it.
void add_features(const PlanOptions& options, DataOutlook& outlook) {
  const TrainOptions& train = options.train;
  const DataShape& shape = outlook.shape;
  const std::vector<std::string>& texts = outlook.text_folders;
  DataPlan& data = outlook.samples;
  StoreInfo info = outlook.info;
  if (info.lanes.empty()) {  // no store: as kiln extract writes one, f32, mean and logvar
    info.channels = shape.channels;
    info.lanes = shape.lanes;
    info.has_logvar = !train.data.in_pixels();
  }
  count_samples(options, info.num_samples, data);
  const auto samples = static_cast<double>(data.num_samples);
  const double array_bytes =
      static_cast<double>(info.channels) * mean_area(info) * static_cast<double>(dtype_size(info.dtype));
  const double arrays = info.has_logvar ? 2 : 1;
  data.latent_bytes = std::llround(samples * static_cast<double>(info.num_flips) * arrays * array_bytes);
  if (shape.text.width > 0) {
    const auto element = static_cast<int64_t>(dtype_size(shape.text.dtype));
    data.caption_bytes =
        shape.text.mean_rows *
        static_cast<double>(shape.text.width * (texts.empty() ? kTextElementBytes : element));
    data.text_bytes = std::llround(samples * data.caption_bytes);
    // A text store has exactly its files, unless the plan is for another number of pictures.
    if (!texts.empty() && data.num_samples == info.num_samples) data.text_bytes = text_store_bytes(texts);
    if (texts.empty() && !shape.text.is_padded)
      data.assumed =
          fmt::format("captions of {:.0f} of at most {} tokens", shape.text.mean_rows, shape.text.max_rows);
  }
  const double read = info.has_logvar && train.data.draw_posterior ? 2 : 1;
  data.read_bytes = read * array_bytes + (1 - train.data.text_dropout_prob) * data.caption_bytes;
}

struct PictureFile {
  ImageHeader header;
  double bytes = 0;
};

// Reads the headers of some pictures, evenly spread. Those that cannot be read are left out, as training
// does.
std::vector<PictureFile> sampled_files(const ImageDataset& images) {
  const auto size = static_cast<int64_t>(images.records().size()), count = std::min(size, kHeaders);
  std::vector<PictureFile> files;
  for (int64_t i = 0; i < count; ++i) try {
      const int64_t index = i * size / count;
      files.push_back(
          {.header = images.header(index), .bytes = static_cast<double>(images.bytes(index).size)});
    } catch (const Error&) {
      continue;
    }
  return files;
}

PictureFile assumed_file(int64_t image_size) {
  const double side = std::max(kShortSide, static_cast<double>(image_size));
  return {.header = {.height = std::llround(side), .width = std::llround(kAspectRatio * side)},
          .bytes = kAspectRatio * side * side * kBytesPerPixel};
}

// Describes pictures that the loader decodes.
void add_pictures(const PlanOptions& options, DataOutlook& outlook) {
  const TrainOptions& train = options.train;
  DataPlan& data = outlook.samples;
  std::vector<PictureFile> files;
  int64_t found = 0;
  if (const auto& images = outlook.pictures.images) {
    found = static_cast<int64_t>(images->all().records().size());
    files = sampled_files(images->all());
  }
  count_samples(options, found, data);
  data.reads_pictures = true;
  if (files.empty()) {
    files.push_back(assumed_file(train.data.image_size));
    data.assumed = "pictures as large as these";
  }
  const double share = 1 / static_cast<double>(files.size());
  for (const auto& [header, bytes] : files) {
    data.formats[choice_name(header.format)] += share;
    data.mean_height += share * static_cast<double>(header.height);
    data.mean_width += share * static_cast<double>(header.width);
    data.read_bytes += share * bytes;
    outlook.headers.push_back(header);
  }
  data.picture_bytes = std::llround(data.read_bytes * static_cast<double>(data.num_samples));
}

// Returns the days of kiln extract on the same devices, at the pace of its encoder or of its decoding
// threads.
double extraction_days(const Plan& plan) {
  const double encoding_s = plan.encoding_s / static_cast<double>(plan.options.train.global_batch);
  const double threads = static_cast<double>(plan.options.train.data.loader_threads * plan.options.gpus);
  return static_cast<double>(plan.samples.num_samples) *
         std::max(encoding_s, plan.samples.decode_s / threads) / kSecondsPerDay;
}

}  // namespace

DataOutlook read_data_outlook(const PlanOptions& options) {
  DataOutlook outlook;
  static_cast<DataDescription&>(outlook) = describe(options.train);
  if (reads_pictures(outlook.source))
    add_pictures(options, outlook);
  else
    add_features(options, outlook);
  const ValidationOptions& validation = options.train.validation;
  if (validation.images > 0 ||
      (validation.is_on() && is_here(held_out_options(options.train.data, validation))))
    outlook.validation_images = validation_samples(options.train, outlook.pictures);
  // What was opened would count as memory of the process that plans its own run.
  outlook.pictures = {};
  outlook.text = outlook.captions = nullptr;
  if (const std::string folder = options.train.data.folder(); !folder.empty()) {
    const FileSystem files = file_system_of(folder);
    outlook.samples.file_system = files.name;
    outlook.samples.is_network = files.is_network;
  }
  return outlook;
}

void add_data(Plan& plan, const DataOutlook& outlook) {
  const TrainOptions& train = plan.options.train;
  DataPlan& data = plan.samples = outlook.samples;
  for (const ImageHeader& picture : outlook.headers)
    data.decode_s +=
        plan.machine.decoding.seconds(picture, train.data.buckets.empty() ? train.data.image_size : 0) /
        static_cast<double>(outlook.headers.size());
  if (plan.encoding_s > 0) plan.extraction_days = extraction_days(plan);

  const int64_t ranks_here = ranks_on_node(plan.machine, plan.options.gpus);
  const double share = static_cast<double>(ranks_here) / static_cast<double>(plan.options.gpus);
  const double values = static_cast<double>(plan.data.channels) * mean_area(plan.data.lanes);
  const double thread_s = data.decode_s + values / kLoaderValuesPerS;  // for one sample
  plan.data_rate = {
      .images_per_s = share * plan.images_per_s,
      .bytes_per_s = share * plan.images_per_s * data.read_bytes,
      .disk_bytes_per_s = plan.machine.disk_bytes_per_s,
      .loader_images_per_s = static_cast<double>(train.data.loader_threads * ranks_here) / thread_s};
}

}  // namespace kiln
