#include "extract/extract.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <unordered_set>
#include <utility>

#include "core/aten.h"
#include "core/error.h"
#include "core/stop_signal.h"
#include "core/text/printable.h"
#include "core/text/progress_line.h"
#include "data/images/image_dataset.h"
#include "data/images/left_out_list.h"
#include "data/store/store_parts.h"
#include "data/store/store_source.h"
#include "extract/picture_lanes.h"
#include "extract/settings.h"
#include "models/autoencoders/tiling.h"
#include "parallel/cpu_share.h"
#include "parallel/machine.h"
#include "parallel/offload/host_copy.h"
#include "parallel/ranks/agreement.h"

namespace kiln {
namespace {

// Where the extraction continues: the beginning of a batch, so that batches are those of an uninterrupted
// run.
struct Position {
  int64_t next_place = 0;   // of PictureLanes
  int64_t num_samples = 0;  // good images before it
  // Samples that the store holds. Those of them from next_place on are encoded again, but not written.
  int64_t num_in_store = 0;
};

class Extraction {
 public:
  // `dataset` has the pictures of options.data. `grown` is the store that options.out becomes a part of; "":
  // options.out is a store of its own.
  Extraction(const ExtractOptions& options, std::shared_ptr<const ImageDataset> dataset,
             const std::string& grown, ProcessGroup& group)
      : options_(options),
        group_(group),
        cpu_share_(cpu_share(group)),
        settings_(resolve(options, group.ranks().local_rank, cpu_share_)),
        dataset_(std::move(dataset)),
        autoencoder_(
            load_autoencoder(options.autoencoder, settings_.device, settings_.compute_dtype,
                             Tiling::parse("tiles", options.tiles,
                                           usable_bytes(settings_.device, group.ranks().local_world_size)))) {
    apply(ComputeSettings{.device = settings_.device,
                          .threads = options.threads,
                          .cpu_share = cpu_share_,
                          .tf32 = options.tf32});
    if (group.rank() == 0) note_tf32("kiln extract", options.tf32, settings_.device);
    lanes_.emplace(lane_options(grown), *dataset_, autoencoder_->downsample, group);
    print_lanes();
    info_ = make_store_info(options, settings_, *dataset_, *autoencoder_, *lanes_);
    if (!grown.empty()) require_same_features(read_store_info(grown), grown, info_, options.data);
    range_ = lanes_->of_rank(group.rank(), group.world_size(), settings_.batch);
  }

  void run() {
    if (group_.world_size() > 1) return run_with_others();
    writer_ = FeatureStoreWriter::open(options_.out, info_, options_.shard_size);
    if (read_store_info(options_.out).complete) return say_complete();
    if (!extract_images(options_.out)) return say_stopped();
    if (position_.num_samples == 0) {
      writer_.reset();
      refuse_empty();
    }
    writer_->finish();
    report(position_.num_samples, num_skipped_);
  }

 private:
  // Every rank fills a store of its own. The first rank joins them.
  void run_with_others() {
    const int64_t num_ranks = group_.world_size();
    const bool is_first = group_.rank() == 0;
    double complete = 0;
    agree(group_, "the folder of the store", [&] {
      if (!is_first) return;
      check_names();
      if (!prepare_store_parts(options_.out, num_ranks)) return;
      FeatureStoreWriter::open(options_.out, info_);  // refuses one of other settings
      complete = 1;
    });
    if (group_.sum({complete}, "the state of the store").front() > 0) {
      if (is_first) say_complete();
      return;
    }
    bool stopped = false;
    const std::string part = store_part_folder(options_.out, group_.rank(), num_ranks);
    if (range_.empty()) {
      record_skipped(part);
    } else {
      writer_ = FeatureStoreWriter::open(part, info_, options_.shard_size);
      stopped = !extract_images(part);
      if (!stopped && position_.num_samples > 0) writer_->finish();
      writer_.reset();
    }
    const std::vector<double> of_all = group_.sum(
        {stopped ? 1.0 : 0.0, static_cast<double>(num_skipped_), static_cast<double>(position_.num_samples)},
        "the end of the extraction");
    if (of_all[0] > 0) {
      if (is_first) say_stopped();
      return;
    }
    int64_t num_samples = 0;
    agree(group_, "joining the store", [&] {
      if (!is_first) return;
      if (of_all[2] == 0) refuse_empty();
      num_samples = join_store_parts(options_.out, num_ranks, info_);
    });
    if (is_first) report(num_samples, static_cast<int64_t>(of_all[1]));
  }

  // Throws Error if two pictures have one name. The writer of each rank sees only the names of its part.
  void check_names() const {
    std::unordered_set<std::string> names;
    for (const ImageRecord& record : dataset_->records())
      if (!names.insert(record.name).second)
        fail("extract", "{} has two pictures named {:?}: names must be unique", options_.data, record.name);
  }

  // Removes what there is of the store, so that the same folder works with another --image-size.
  [[noreturn]] void refuse_empty() const {
    remove_empty_store(options_.out);
    lanes_->refuse_all();
  }
  void say_complete() const {
    fmt::print("{} is complete with {} samples: nothing to do\n", options_.out,
               read_store_info(options_.out).num_samples);
  }
  void say_stopped() const { fmt::print(stderr, "stopped: the same command continues\n"); }

  // Writes the images of range_ that the store in `folder` lacks. Returns false when a signal ended it.
  bool extract_images(const std::string& folder) {
    record_skipped(folder);
    position_ = find_position();
    num_skipped_ = position_.next_place - range_.first - position_.num_samples;
    if (position_.num_in_store > 0)
      fmt::print(stderr, "{} holds {} samples: going on behind them\n", folder, position_.num_in_store);
    ProgressLine progress(position_.next_place - range_.first, range_.last - range_.first,
                          /*is_shown=*/group_.rank() == 0);
    ImagePipeline pipeline(
        position_.next_place, range_.last, [this](int64_t place) { return load(place); },
        settings_.num_workers, 2 * settings_.batch);
    int64_t done = position_.next_place - range_.first;
    std::vector<PreparedImage> batch;
    for (PreparedImage image; !stop_.requested() && pipeline.next(image);
         progress.update(static_cast<double>(done), num_skipped_)) {
      ++done;
      if (!image.error.empty()) {
        skip(image, progress);
        continue;
      }
      if (!batch.empty() && lanes_->lane_of(batch.front().index) != lanes_->lane_of(image.index))
        submit(batch);
      batch.push_back(std::move(image));
      if (static_cast<int64_t>(batch.size()) == settings_.batch) submit(batch);
    }
    const bool stopped = stop_.requested();
    if (!stopped) submit(batch);
    write(take_encoded());
    progress.finish(stopped ? done - static_cast<int64_t>(batch.size()) : done, num_skipped_);
    return !stopped;
  }

  // Walks back from the last sample in the store to the beginning of its batch.
  Position find_position() const {
    const int64_t num_in_store = writer_->num_complete();
    if (num_in_store == 0) return {.next_place = range_.first};
    int64_t last = range_.first;
    while (last < range_.last && record_of(last).name != writer_->last_name()) ++last;
    if (last == range_.last)
      fail("extract", "the store's last sample {} is not in {}: choose another --out", writer_->last_name(),
           options_.data);
    Position position{last + 1, num_in_store, num_in_store};
    for (int64_t in_batch = writer_->num_complete_of(lanes_->lane_of(last)) % settings_.batch;
         in_batch > 0;) {
      --position.next_place;
      if (!is_good(position.next_place)) continue;
      --position.num_samples;
      --in_batch;
    }
    return position;
  }

  // Pictures that are added to a store of buckets go to its own.
  PictureLaneOptions lane_options(const std::string& grown) const {
    PictureLaneOptions options = lane_options_of(options_, settings_);
    if (grown.empty() || options.buckets.empty()) return options;
    for (const std::string& part : store_parts(grown))
      for (const Lane& lane : read_store_info(part).lanes) {
        const Bucket bucket{.height = lane.height * autoencoder_->downsample,
                            .width = lane.width * autoencoder_->downsample,
                            .aspect_ratio = lane.aspect_ratio};
        const auto is_same = [&](const Bucket& other) {
          return other.height == bucket.height && other.width == bucket.width;
        };
        if (lane.aspect_ratio > 0 && std::ranges::none_of(options.among, is_same))
          options.among.push_back(bucket);
      }
    if (options.among.empty()) return options;
    options.bucket_min = 1;
    if (options.image_size == 0) options.image_size = read_store_info(grown).image_size;
    return options;
  }

  // Begins the list of skipped pictures in a folder with those that have no place.
  void record_skipped(const std::string& folder) {
    if (range_.empty() && lanes_->skipped().empty()) return;
    std::filesystem::create_directories(folder);
    skipped_.emplace(folder);
    for (const SkippedPicture& picture : lanes_->skipped()) skipped_->add(picture);
  }

  // Prints what the buckets hold, and which pictures are left out.
  void print_lanes() const {
    for (const SkippedPicture& picture : lanes_->skipped())
      fmt::print(stderr, "skipped: {}\n", printable(picture.why));
    if (group_.rank() != 0) return;
    fmt::print("{}", lanes_->table_text());
    std::fflush(stdout);
  }

  Image load(int64_t place) const { return lanes_->load(lanes_->picture(place), lanes_->lane_of(place)); }

  const ImageRecord& record_of(int64_t place) const { return dataset_->records()[lanes_->picture(place)]; }

  bool is_good(int64_t place) const {
    try {
      load(place);
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  void skip(const PreparedImage& image, ProgressLine& progress) {
    if (options_.strict) fail("extract", "{} (--strict)", image.error);
    ++num_skipped_;
    skipped_->add({.name = record_of(image.index).name, .why = image.error});
    progress.clear();
    fmt::print(stderr, "skipped: {}\n", printable(image.error));
  }

  // A batch that the device works on, or has finished.
  struct Encoded {
    std::vector<int64_t> places;  // of the images
    HostRead moments;             // (flips * B, channels, h, w) f32
  };

  // Starts encoding the batch, empties it, and writes the batch before. While a GPU encodes, the host
  // decodes, fills the next batch and writes the last one.
  void submit(std::vector<PreparedImage>& batch) {
    if (batch.empty()) return;
    const at::Tensor images = to_tensor(batch);
    const Encoded previous = take_encoded();
    for (const PreparedImage& image : batch) encoded_.places.push_back(image.index);
    const at::NoGradGuard no_grad;
    encoded_.moments =
        HostRead(autoencoder_->encode(sent_to(images, settings_.device)).to(at::kFloat).contiguous());
    batch.clear();
    write(previous);
  }

  Encoded take_encoded() { return std::exchange(encoded_, {}); }

  void write(const Encoded& encoded) {
    if (encoded.places.empty()) return;
    const at::Tensor& moments = encoded.moments.wait();
    const auto size = static_cast<int64_t>(encoded.places.size());
    const int64_t lane = lanes_->lane_of(encoded.places[0]), latent_size = info_.latent_size(lane);
    const bool has_logvar = autoencoder_->has_posterior;
    const float* values = moments.const_data_ptr<float>();
    const int64_t values_per_image = moments.numel() / moments.size(0);
    for (int64_t i = 0; i < size; ++i) {
      if (position_.num_samples++ < position_.num_in_store) continue;
      const ImageRecord& record = record_of(encoded.places[i]);
      FeatureStoreWriter::Sample sample{
          .name = record.name,
          .caption = record.captions.empty() ? "" : record.captions.front().text,
          .label = record.label,
          .mean = {},
          .logvar = {},
          .lane = lane,
          .image_hw = lanes_->image_hw(lanes_->picture(encoded.places[i]))};
      for (int64_t flip = 0; flip < settings_.num_flips; ++flip) {
        const float* mean = values + (flip * size + i) * values_per_image;
        sample.mean.insert(sample.mean.end(), mean, mean + latent_size);
        if (has_logvar) sample.logvar.insert(sample.logvar.end(), mean + latent_size, mean + 2 * latent_size);
      }
      writer_->add(sample);
    }
  }

  at::Tensor to_tensor(const std::vector<PreparedImage>& batch) const {
    const auto size = static_cast<int64_t>(batch.size());
    const int64_t height = batch[0].image.height, width = batch[0].image.width,
                  image_values = 3 * height * width;
    at::Tensor images =
        host_empty({settings_.num_flips * size, 3, height, width}, at::kFloat, settings_.device);
    const std::span<float> values(images.mutable_data_ptr<float>(), images.numel());
    for (int64_t flip = 0; flip < settings_.num_flips; ++flip)
      for (int64_t i = 0; i < size; ++i)
        write_image_values(batch[i].image, flip == 1,
                           values.subspan((flip * size + i) * image_values, image_values));
    return images;
  }

  // `num_skipped` counts only pictures that have a place.
  void report(int64_t num_samples, int64_t num_skipped) const {
    const size_t num_classes = dataset_->class_names().size();
    fmt::print("{} samples{} in {}\n", num_samples,
               num_classes > 0 ? fmt::format(", {} classes,", num_classes) : "", options_.out);
    if (const int64_t all = num_skipped + lanes_->num_left_out(); all > 0)
      fmt::print("{}{} of {} says why\n", lanes_->skipped_text(all), kLeftOutFile, options_.out);
  }

  const StopSignal stop_;  // also while waiting for other ranks
  const ExtractOptions options_;
  ProcessGroup& group_;
  const int64_t cpu_share_;
  const ExtractSettings settings_;
  const std::shared_ptr<const ImageDataset> dataset_;
  const std::unique_ptr<Autoencoder> autoencoder_;
  std::unique_ptr<FeatureStoreWriter> writer_;
  std::optional<PictureLanes> lanes_;
  StoreInfo info_;
  PictureLanes::Range range_;  // of this rank
  Position position_;
  Encoded encoded_;
  std::optional<SkippedPictures> skipped_;
  int64_t num_skipped_ = 0;
};

}  // namespace

void extract(const ExtractOptions& options, ProcessGroup& group) {
  if (options.autoencoder.empty() && options.text.encoder.empty())
    fail("extract", "give --autoencoder, --text-encoder or both");
  as_rank(group, [&] {
    const bool has_pictures = !options.autoencoder.empty(), has_text = !options.text.encoder.empty();
    if (has_text)
      agree(group, "--text-encoder", [&] {
        if (group.rank() == 0) check_text_encoder(options.text);
      });
    const std::shared_ptr<const ImageDataset> pictures = ImageDataset::open(options.data);
    if (group.rank() == 0)
      for (const std::string& note : pictures->notes()) fmt::print(stderr, "note: {}\n", printable(note));
    if (options.append)
      return append_pictures(
          options, pictures, group,
          [&](const ExtractOptions& of_part, const std::shared_ptr<const ImageDataset>& some) {
            Extraction(of_part, some, options.out, group).run();
          });
    if (has_pictures) Extraction(options, pictures, "", group).run();
    if (has_text && (!has_pictures || read_store_info(options.out).complete))
      extract_text(options, *pictures, options.out, group);
  });
}

}  // namespace kiln
