#include "data/store/store_import.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <set>
#include <tuple>

#include "core/error.h"
#include "core/files/xxh3.h"
#include "core/text/progress_line.h"
#include "data/store/feature_store.h"
#include "data/store/other_caches.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

Dtype parse_storage_dtype(const std::string& name) {
  if (name == "f32") return Dtype::kF32;
  if (name == "bf16") return Dtype::kBF16;
  if (name == "fp16") return Dtype::kF16;
  fail("store import", "--dtype: expected f32, bf16 or fp16, got {:?}", name);
}

class Import {
 public:
  explicit Import(const StoreImportOptions& options) : options_(options), has_std_(options.from == "pixart") {
    if (options.from != "fast-dit" && options.from != "pixart")
      fail("store import", "--from: expected fast-dit or pixart, got {:?}", options.from);
    if (options.image_size < 1)
      fail("store import", "--image-size: expected at least 1, got {}", options.image_size);
    if (has_std_ && options.scaling_factor == 0)
      fail("store import",
           "--scaling-factor is needed: PixArt's caches are unscaled (0.18215 for PixArt-alpha's "
           "autoencoder, 0.13025 for PixArt-Sigma's)");
    if (has_std_ && !options.labels.empty())
      fail("store import", "PixArt's caches have no labels, got {}", options.labels);
    if (!has_std_ && !options.data_info.empty())
      fail("store import", "--data-info is only for --from pixart, got {}", options.data_info);
    find_files();
    read_labels();
    if (!options.data_info.empty()) list_.emplace(options.data_info);
    find_lanes();
  }

  void run() {
    StoreInfo info = make_info();
    const auto writer = FeatureStoreWriter::open(options_.out, info);
    const auto total = static_cast<int64_t>(names_.size());
    const int64_t first = writer->num_complete();
    if (first > total || (first > 0 && names_[first - 1] != writer->last_name()))
      fail("store import", "{} ends with sample {:?}, which is not number {} of {}: choose another --out",
           options_.out, writer->last_name(), first, options_.features);
    ShardProgress progress("imported", total);
    for (int64_t i = first; i < total; ++i) {
      writer->add(read_sample(i, info));
      progress.update(i + 1);
    }
    writer->finish();
    report(total);
  }

 private:
  void find_files() {
    if (!has_std_) {
      const std::string inside = find_folder(options_.features, "_features");
      if (!inside.empty()) {
        if (options_.labels.empty()) options_.labels = find_folder(options_.features, "_labels");
        options_.features = inside;
      }
    }
    names_ = list_npy(options_.features, num_other_files_);
    if (names_.empty()) fail("store import", "expected .npy files, got none ({})", options_.features);
  }

  // Reads all labels first, because the number of classes is part of the store's settings.
  void read_labels() {
    if (options_.labels.empty()) return;
    int64_t num_other_files = 0;
    const std::vector<std::string> label_names = list_npy(options_.labels, num_other_files);
    const std::set<std::string> features(names_.begin(), names_.end()),
        labels(label_names.begin(), label_names.end());
    for (const auto& name : names_) {
      if (!labels.contains(name)) fail("store import", "{} has no label ({})", name, options_.labels);
    }
    for (const auto& name : label_names) {
      if (!features.contains(name))
        fail("store import", "label {} has no features ({})", name, options_.features);
    }
    for (const auto& name : names_) {
      labels_.push_back(read_label((fs::path(options_.labels) / name).string()));
      num_classes_ = std::max(num_classes_, labels_.back() + 1);
    }
    if (options_.num_classes > 0 && options_.num_classes < num_classes_)
      fail("store import", "--num-classes: expected at least {} for these labels, got {}", num_classes_,
           options_.num_classes);
    num_classes_ = std::max(num_classes_, options_.num_classes);
  }

  // Sorts the files lane by lane, in the order of their aspect ratios: the latents of multi-scale training
  // have several shapes.
  void find_lanes() {
    std::vector<Shape> shapes;
    if (!has_std_) {  // all have one shape: read_sample() compares each with the first
      const std::string path = path_of(names_.front());
      shapes.assign(names_.size(), latent_shape(read_npy_header(path).shape, path));
    }
    for (size_t i = shapes.size(); i < names_.size(); ++i) {
      const std::string& name = names_[i];
      const std::string path = path_of(name);
      shapes.push_back(latent_shape(read_npy_header(path).shape, path));
      if (shapes.back().channels != shapes.front().channels)
        fail("store import", "expected latents of {} channels as in {}, got {} ({})", shapes.front().channels,
             names_.front(), shapes.back().channels, path);
    }
    channels_ = shapes.front().channels;
    const bool has_buckets = list_ || std::any_of(shapes.begin(), shapes.end(),
                                                  [&](const Shape& s) { return s != shapes.front(); });
    std::vector<std::pair<Lane, std::string>> placed;
    for (size_t i = 0; i < names_.size(); ++i) {
      const auto& [channels, height, width] = shapes[i];
      placed.emplace_back(has_buckets ? pixart_lane(height, width, options_.image_size)
                                      : Lane{.height = height, .width = width},
                          names_[i]);
    }
    const auto is_before = [](const auto& a, const auto& b) {
      return std::tie(a.first.aspect_ratio, a.first.height, a.first.width) <
             std::tie(b.first.aspect_ratio, b.first.height, b.first.width);
    };
    if (has_buckets) std::stable_sort(placed.begin(), placed.end(), is_before);
    for (size_t i = 0; i < names_.size(); ++i) {
      if (lanes_.empty() || lanes_.back() != placed[i].first) lanes_.push_back(placed[i].first);
      names_[i] = placed[i].second;
      lane_of_.push_back(std::ssize(lanes_) - 1);
    }
  }

  std::string path_of(const std::string& name) const { return (fs::path(options_.features) / name).string(); }

  StoreInfo make_info() const {
    StoreInfo info;
    info.autoencoder = "autoencoder_kl";
    info.scaling_factor = options_.scaling_factor != 0 ? options_.scaling_factor : 0.18215;
    info.channels = channels_;
    info.lanes = lanes_;
    info.has_image_size = list_.has_value();
    info.image_size = options_.image_size;
    info.has_logvar = has_std_;
    info.already_scaled = !has_std_;
    info.dtype = parse_storage_dtype(options_.dtype);
    for (int64_t c = 0; c < num_classes_; ++c) info.class_names.push_back(std::to_string(c));
    // Other files or labels make another store, so an interrupted import does not continue with them.
    std::string listing;
    for (size_t i = 0; i < names_.size(); ++i) {
      listing += fmt::format("{}\t{}\n", names_[i], labels_.empty() ? -1 : labels_[i]);
      if (!list_) continue;
      const PixartList::Picture& picture = list_->of_latents(names_[i]);
      listing += fmt::format("{} {} {}\n", picture.image_hw[0], picture.image_hw[1], picture.prompt);
    }
    info.source = {{"imported_from", options_.from},
                   {"features", fs::path(options_.features).lexically_normal().filename().string()},
                   {"num_files", names_.size()},
                   {"files_xxh3", xxh3_hex(std::as_bytes(std::span(listing)))}};
    return info;
  }

  struct Shape {
    int64_t channels, height, width;
    bool operator==(const Shape&) const = default;
  };

  Shape latent_shape(std::vector<int64_t> shape, const std::string& path) const {
    const std::string text = fmt::format("{}", fmt::join(shape, ", "));
    if (shape.size() == 4 && shape[0] == 1) shape.erase(shape.begin());
    const bool odd = has_std_ && shape.size() == 3 && shape[0] % 2 != 0;
    if (shape.size() != 3 || odd || *std::min_element(shape.begin(), shape.end()) < 1)
      fail("store import", "expected one sample ({}, h, w), got ({}) ({})", has_std_ ? "2C" : "C", text,
           path);
    return {has_std_ ? shape[0] / 2 : shape[0], shape[1], shape[2]};
  }

  FeatureStoreWriter::Sample read_sample(int64_t index, const StoreInfo& info) const {
    const std::string& name = names_[index];
    const std::string path = path_of(name);
    const NpyArray array = read_npy(path);
    const Shape shape = latent_shape(array.shape, path);
    const int64_t lane = lane_of_[static_cast<size_t>(index)];
    const Lane& expected = info.lanes[static_cast<size_t>(lane)];
    if (shape != Shape{info.channels, expected.height, expected.width})
      fail("store import", "expected latents ({}, {}, {}) as in {}, got ({}, {}, {}) ({})", info.channels,
           expected.height, expected.width, names_.front(), shape.channels, shape.height, shape.width, path);
    FeatureStoreWriter::Sample sample;
    sample.name = name;
    sample.lane = lane;
    if (list_) {
      const PixartList::Picture& picture = list_->of_latents(name);
      sample.image_hw = picture.image_hw;
      sample.caption = picture.prompt;
    }
    if (!labels_.empty()) sample.label = labels_[index];
    sample.mean = float_values(array, path);
    if (!has_std_) return sample;
    const auto half = static_cast<int64_t>(sample.mean.size() / 2);
    for (int64_t i = half; i < 2 * half; ++i) {
      const float sigma = sample.mean[i];
      if (sigma < 0) fail("store import", "expected standard deviations, got {} ({})", sigma, path);
      // Readers of logvar clamp it to -30, which is the standard deviation e^-15.
      sample.logvar.push_back(std::max(2 * std::log(sigma), -30.0f));
    }
    sample.mean.resize(half);
    return sample;
  }

  void report(int64_t total) const {
    fmt::print("{}: {} samples", options_.out, total);
    if (num_classes_ > 0) fmt::print(", {} classes", num_classes_);
    if (num_other_files_ > 0) fmt::print(", {} files that are not .npy left out", num_other_files_);
    fmt::print("\n");
    if (!has_std_)
      fmt::print(
          "note: fast-DiT kept one posterior sample and no mirrored copy of each image; kiln extract --flip "
          "both keeps all\n");
  }

  StoreImportOptions options_;
  bool has_std_;
  std::optional<PixartList> list_;
  std::vector<std::string> names_;
  int64_t channels_ = 0;
  std::vector<Lane> lanes_;
  std::vector<int64_t> lane_of_;  // of each name
  std::vector<int64_t> labels_;   // of each name; empty without labels
  int64_t num_classes_ = 0, num_other_files_ = 0;
};

}  // namespace

void import_store(const StoreImportOptions& options) { Import(options).run(); }

}  // namespace kiln
