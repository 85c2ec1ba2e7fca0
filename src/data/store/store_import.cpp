#include "data/store/store_import.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>

#include "core/error.h"
#include "core/files/xxh3.h"
#include "data/images/npz.h"
#include "data/store/feature_store.h"
#include "data/store/shard_progress.h"

namespace kiln {
namespace {

namespace fs = std::filesystem;

// 12 of "12.npy": fast-DiT's names sort as numbers.
std::optional<int64_t> number_of(const std::string& name) {
  const std::string stem = name.substr(0, name.size() - std::strlen(".npy"));
  int64_t number = 0;
  const auto [end, error] = std::from_chars(stem.data(), stem.data() + stem.size(), number);
  if (error != std::errc() || end != stem.data() + stem.size()) return std::nullopt;
  return number;
}

// Paths of all .npy files below `folder`, relative to it; numbers in their order, then names.
std::vector<std::string> list_npy(const std::string& folder, int64_t& num_other_files) {
  if (!fs::is_directory(folder)) fail("store import", "expected a folder of .npy files, got {}", folder);
  std::vector<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    if (entry.path().extension() == ".npy") {
      names.push_back(fs::relative(entry.path(), folder).string());
    } else {
      ++num_other_files;
    }
  }
  std::sort(names.begin(), names.end(), [](const std::string& a, const std::string& b) {
    const auto x = number_of(a), y = number_of(b);
    if (x.has_value() != y.has_value()) return x.has_value();
    return x != y ? x < y : a < b;
  });
  return names;
}

// The one folder in `parent` whose name ends with `suffix`, "" if there is none.
std::string find_folder(const std::string& parent, std::string_view suffix) {
  std::string found;
  if (!fs::is_directory(parent)) return found;
  for (const auto& entry : fs::directory_iterator(parent)) {
    if (!entry.is_directory() || !entry.path().filename().string().ends_with(suffix)) continue;
    if (!found.empty()) {
      fail("store import", "expected one folder *{} in {}, got {} and {}: give the folder itself", suffix,
           parent, found, entry.path().string());
    }
    found = entry.path().string();
  }
  return found;
}

std::vector<float> float_values(const NpyArray& array, const std::string& path) {
  const size_t element = dtype_size(array.dtype);
  std::vector<float> values(array.bytes.size() / element);
  for (size_t i = 0; i < values.size(); ++i) {
    const std::byte* p = array.bytes.data() + i * element;
    if (array.dtype == Dtype::kF32) {
      std::memcpy(&values[i], p, 4);
    } else if (array.dtype == Dtype::kF16) {
      uint16_t bits;
      std::memcpy(&bits, p, 2);
      values[i] = fp16_to_float(bits);
    } else if (array.dtype == Dtype::kF64) {
      double value;
      std::memcpy(&value, p, 8);
      values[i] = static_cast<float>(value);
    } else {
      fail("store import", "expected floating point values, got {} ({})", dtype_name(array.dtype), path);
    }
  }
  return values;
}

int64_t read_label(const std::string& path) {
  const NpyArray array = read_npy(path);
  const bool is_integer = array.dtype == Dtype::kI64 || array.dtype == Dtype::kI32;
  if (!is_integer || array.bytes.size() != dtype_size(array.dtype)) {
    fail("store import", "expected one integer label, got {} ({}) ({})", dtype_name(array.dtype),
         fmt::join(array.shape, ", "), path);
  }
  int64_t label = 0;
  int32_t narrow = 0;
  if (array.dtype == Dtype::kI64) {
    std::memcpy(&label, array.bytes.data(), sizeof(label));
  } else {
    std::memcpy(&narrow, array.bytes.data(), sizeof(narrow));
    label = narrow;
  }
  if (label < 0) fail("store import", "expected a label from 0 on, got {} ({})", label, path);
  return label;
}

Dtype parse_storage_dtype(const std::string& name) {
  if (name == "f32") return Dtype::kF32;
  if (name == "bf16") return Dtype::kBF16;
  if (name == "fp16") return Dtype::kF16;
  fail("store import", "--dtype: expected f32, bf16 or fp16, got {:?}", name);
}

class Import {
 public:
  explicit Import(const StoreImportOptions& options) : options_(options), has_std_(options.from == "pixart") {
    if (options.from != "fast-dit" && options.from != "pixart") {
      fail("store import", "--from: expected fast-dit or pixart, got {:?}", options.from);
    }
    if (options.image_size < 1)
      fail("store import", "--image-size: expected at least 1, got {}", options.image_size);
    if (has_std_ && options.scaling_factor == 0) {
      fail("store import",
           "--scaling-factor is needed: PixArt's caches are unscaled (0.18215 for PixArt-alpha's "
           "autoencoder, 0.13025 for PixArt-Sigma's)");
    }
    if (has_std_ && !options.labels.empty())
      fail("store import", "PixArt's caches have no labels, got {}", options.labels);
    find_files();
    read_labels();
  }

  void run() {
    StoreInfo info = make_info();
    const auto writer = FeatureStoreWriter::open(options_.out, info);
    const auto total = static_cast<int64_t>(names_.size());
    const int64_t first = writer->num_complete();
    if (first > total || (first > 0 && names_[first - 1] != writer->last_name())) {
      fail("store import", "{} ends with sample {:?}, which is not number {} of {}: choose another --out",
           options_.out, writer->last_name(), first, options_.features);
    }
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

  // All labels first: the number of classes is part of the store's settings.
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
    if (options_.num_classes > 0 && options_.num_classes < num_classes_) {
      fail("store import", "--num-classes: expected at least {} for these labels, got {}", num_classes_,
           options_.num_classes);
    }
    num_classes_ = std::max(num_classes_, options_.num_classes);
  }

  StoreInfo make_info() const {
    StoreInfo info;
    const std::string path = (fs::path(options_.features) / names_.front()).string();
    const auto [channels, height, width] = latent_shape(read_npy(path), path);
    info.autoencoder = "autoencoder_kl";
    info.scaling_factor = options_.scaling_factor != 0 ? options_.scaling_factor : 0.18215;
    info.channels = channels;
    info.lanes = {{.height = height, .width = width}};
    info.image_size = options_.image_size;
    info.has_logvar = has_std_;
    info.already_scaled = !has_std_;
    info.dtype = parse_storage_dtype(options_.dtype);
    for (int64_t c = 0; c < num_classes_; ++c) info.class_names.push_back(std::to_string(c));
    // Other files or labels are another store: an interrupted import does not continue with them.
    std::string listing;
    for (size_t i = 0; i < names_.size(); ++i) {
      listing += fmt::format("{}\t{}\n", names_[i], labels_.empty() ? -1 : labels_[i]);
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

  Shape latent_shape(const NpyArray& array, const std::string& path) const {
    std::vector<int64_t> shape = array.shape;
    if (shape.size() == 4 && shape[0] == 1) shape.erase(shape.begin());
    const bool odd = has_std_ && shape.size() == 3 && shape[0] % 2 != 0;
    if (shape.size() != 3 || odd || *std::min_element(shape.begin(), shape.end()) < 1) {
      fail("store import", "expected one sample ({}, h, w), got ({}) ({})", has_std_ ? "2C" : "C",
           fmt::join(array.shape, ", "), path);
    }
    return {has_std_ ? shape[0] / 2 : shape[0], shape[1], shape[2]};
  }

  FeatureStoreWriter::Sample read_sample(int64_t index, const StoreInfo& info) const {
    const std::string& name = names_[index];
    const std::string path = (fs::path(options_.features) / name).string();
    const NpyArray array = read_npy(path);
    const Shape shape = latent_shape(array, path);
    if (shape != Shape{info.channels, info.lanes[0].height, info.lanes[0].width}) {
      fail("store import", "expected latents ({}, {}, {}) as in {}, got ({}, {}, {}) ({})", info.channels,
           info.lanes[0].height, info.lanes[0].width, names_.front(), shape.channels, shape.height,
           shape.width, path);
    }
    FeatureStoreWriter::Sample sample;
    sample.name = name;
    if (!labels_.empty()) sample.label = labels_[index];
    sample.mean = float_values(array, path);
    if (!has_std_) return sample;
    const auto half = static_cast<int64_t>(sample.mean.size() / 2);
    for (int64_t i = half; i < 2 * half; ++i) {
      const float sigma = sample.mean[i];
      if (sigma < 0) fail("store import", "expected standard deviations, got {} ({})", sigma, path);
      // What reads logvar clamps it to -30, the standard deviation e^-15.
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
    if (!has_std_) {
      fmt::print(
          "note: fast-DiT kept one posterior sample and no mirrored copy of each image; kiln extract --flip "
          "both "
          "keeps all\n");
    }
  }

  StoreImportOptions options_;
  bool has_std_;
  std::vector<std::string> names_;
  std::vector<int64_t> labels_;  // of names_; empty without labels
  int64_t num_classes_ = 0, num_other_files_ = 0;
};

}  // namespace

void import_store(const StoreImportOptions& options) { Import(options).run(); }

}  // namespace kiln
