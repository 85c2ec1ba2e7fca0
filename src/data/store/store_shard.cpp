#include "data/store/store_shard.h"

#include <fmt/ranges.h>

#include "core/error.h"
#include "core/files/xxh3.h"

namespace kiln {
namespace {

constexpr const char* kMeanName = "mean";
constexpr const char* kLogvarName = "logvar";
constexpr const char* kLabels = "class_labels";
constexpr const char* kNames = "name";
constexpr const char* kCaptions = "caption";

constexpr const char* kChecksums = "sample_xxh3";
constexpr const char* kImageHw = "image_hw";

std::vector<int64_t> latents_shape(const StoreInfo& info, const Lane& lane, int64_t num_samples) {
  return {num_samples, info.num_flips, info.channels, lane.height, lane.width};
}

}  // namespace

StoreShard::StoreShard(std::unique_ptr<TensorFile> file, const StoreInfo& info, const StoreInfo::Shard& shard,
                       const std::string& where)
    : file_(std::move(file)),
      where_(where),
      dtype_(info.dtype),
      num_samples_(shard.num_samples),
      num_flips_(info.num_flips),
      latent_elements_(info.latent_size(shard.lane)),
      latent_bytes_(latent_elements_ * static_cast<int64_t>(dtype_size(info.dtype))),
      first_reads_(2 * shard.num_samples) {
  const int64_t num_samples = shard.num_samples;
  const std::vector<int64_t> shape =
      latents_shape(info, info.lanes[static_cast<size_t>(shard.lane)], num_samples);
  parts_[kMean] = tensor(kMeanName, info.dtype, shape).data();
  if (info.has_logvar) parts_[kLogvar] = tensor(kLogvarName, info.dtype, shape).data();
  labels_ = reinterpret_cast<const int64_t*>(tensor(kLabels, Dtype::kI64, {num_samples}).data());
  if (file_->tensors().contains(kChecksums))
    checksums_ = reinterpret_cast<const int64_t*>(tensor(kChecksums, Dtype::kI64, {num_samples, 2}).data());
  if (info.has_image_size || file_->tensors().contains(kImageHw))
    image_hw_ = reinterpret_cast<const int64_t*>(tensor(kImageHw, Dtype::kI64, {num_samples, 2}).data());
  names_ = ragged(kNames);
  captions_ = ragged(kCaptions);
  if (!shard.columns_xxh3.empty() && columns_xxh3() != shard.columns_xxh3)
    fail("feature store",
         "{} is not the shard that store.json names: its checksum is another, so it was exchanged, or its "
         "labels, names or captions have changed: put the right one back, or extract again",
         where);
  const auto num_classes = static_cast<int64_t>(info.class_names.size());
  for (int64_t i = 0; i < num_samples; ++i) {
    if (labels_[i] < -1 || labels_[i] >= num_classes)
      fail("feature store", "expected a label from -1 to {} for sample {:?}, got {} ({})", num_classes - 1,
           name(i), labels_[i], where);
    if (info.has_image_size && (image_hw(i)[0] < 1 || image_hw(i)[1] < 1))
      fail("feature store", "expected the size of the original picture of sample {:?}, got {} x {} ({})",
           name(i), image_hw(i)[0], image_hw(i)[1], where);
  }
}

void StoreShard::check(Part part, int64_t index) const {
  if (!checksums_) return;
  first_reads_.once(2 * index + part, [&] {
    const std::span bytes(latents(part, index, 0), static_cast<size_t>(sample_bytes()));
    if (static_cast<int64_t>(xxh3(bytes)) != checksums_[2 * index + part])
      fail("feature store",
           "sample {:?} is damaged: its bytes have changed since it was written ({}): extract again, or copy "
           "the shard from where it is whole",
           name(index), where_);
  });
}

std::string StoreShard::columns_xxh3() const {
  const auto integers = [](const int64_t* column, int64_t size) {
    return std::as_bytes(std::span(column, static_cast<size_t>(column ? size : 0)));
  };
  const auto bytes_of = [&](const Ragged& texts) {
    return std::as_bytes(std::span(texts.bytes, static_cast<size_t>(texts.offsets[num_samples_])));
  };
  return kiln::columns_xxh3({integers(labels_, num_samples_), integers(checksums_, 2 * num_samples_),
                             integers(image_hw_, 2 * num_samples_),
                             integers(names_.offsets, num_samples_ + 1), bytes_of(names_),
                             integers(captions_.offsets, num_samples_ + 1), bytes_of(captions_)});
}

std::span<const std::byte> StoreShard::tensor(const std::string& name, Dtype dtype,
                                              const std::vector<int64_t>& shape) const {
  const auto found = file_->tensors().find(name);
  if (found == file_->tensors().end())
    fail("feature store", "expected tensor {:?}, got none ({})", name, where_);
  const TensorView& view = found->second;
  if (view.dtype != dtype || view.shape != shape)
    fail("feature store", "expected {} {} ({}), got {} ({}) ({})", name, dtype_name(dtype),
         fmt::join(shape, ", "), dtype_name(view.dtype), fmt::join(view.shape, ", "), where_);
  if (reinterpret_cast<uintptr_t>(view.bytes.data()) % dtype_size(dtype) != 0)
    fail("feature store",
         "{} does not begin at a multiple of its element size ({}): it was not written by kiln", name,
         where_);
  return view.bytes;
}

StoreShard::Ragged StoreShard::ragged(const std::string& name) const {
  Ragged result;
  const std::string offsets_name = name + "_offsets", bytes_name = name + "_bytes";
  result.offsets =
      reinterpret_cast<const int64_t*>(tensor(offsets_name, Dtype::kI64, {num_samples_ + 1}).data());
  const auto bytes = file_->tensors().find(bytes_name);
  if (bytes == file_->tensors().end())
    fail("feature store", "expected tensor {:?}, got none ({})", bytes_name, where_);
  const auto num_bytes = static_cast<int64_t>(bytes->second.bytes.size());
  result.bytes = reinterpret_cast<const char*>(tensor(bytes_name, Dtype::kU8, {num_bytes}).data());
  bool rising = result.offsets[0] == 0 && result.offsets[num_samples_] == num_bytes;
  for (int64_t i = 0; i < num_samples_; ++i) rising &= result.offsets[i] <= result.offsets[i + 1];
  if (!rising)
    fail("feature store", "{} do not rise from 0 to {} ({}): the shard is damaged", offsets_name, num_bytes,
         where_);
  return result;
}

void ShardColumns::append(const SampleLog::Record& record) {
  mean.insert(mean.end(), record.mean.begin(), record.mean.end());
  logvar.insert(logvar.end(), record.logvar.begin(), record.logvar.end());
  labels.push_back(record.label);
  for (const auto part : {record.mean, record.logvar}) checksums.push_back(static_cast<int64_t>(xxh3(part)));
  image_hws.insert(image_hws.end(), record.image_hw.begin(), record.image_hw.end());
  names.append(record.name);
  captions.append(record.caption);
  name_offsets.push_back(static_cast<int64_t>(names.size()));
  caption_offsets.push_back(static_cast<int64_t>(captions.size()));
}

void ShardColumns::clear() {
  mean.clear();
  logvar.clear();
  labels.clear();
  checksums.clear();
  image_hws.clear();
  names.clear();
  captions.clear();
  name_offsets.assign(1, 0);
  caption_offsets.assign(1, 0);
}

std::string ShardColumns::columns_xxh3() const {
  const auto bytes_of = [](const auto& column) { return std::as_bytes(std::span(column)); };
  return kiln::columns_xxh3({bytes_of(labels), bytes_of(checksums), bytes_of(image_hws),
                             bytes_of(name_offsets), bytes_of(names), bytes_of(caption_offsets),
                             bytes_of(captions)});
}

void ShardColumns::write(const std::string& path, const StoreInfo& info, const Lane& lane) const {
  const int64_t n = num_samples();
  const std::vector<int64_t> latents = latents_shape(info, lane, n);
  std::vector<NamedTensor> tensors;
  tensors.push_back({kMeanName, {info.dtype, latents, mean}});
  if (info.has_logvar) tensors.push_back({kLogvarName, {info.dtype, latents, logvar}});
  tensors.push_back({kLabels, {Dtype::kI64, {n}, std::as_bytes(std::span(labels))}});
  tensors.push_back({kChecksums, {Dtype::kI64, {n, 2}, std::as_bytes(std::span(checksums))}});
  tensors.push_back({kImageHw, {Dtype::kI64, {n, 2}, std::as_bytes(std::span(image_hws))}});
  const auto add_ragged = [&](const std::string& name, const std::vector<int64_t>& offsets,
                              const std::string& bytes) {
    tensors.push_back({name + "_offsets", {Dtype::kI64, {n + 1}, std::as_bytes(std::span(offsets))}});
    tensors.push_back({name + "_bytes",
                       {Dtype::kU8, {static_cast<int64_t>(bytes.size())}, std::as_bytes(std::span(bytes))}});
  };
  add_ragged(kNames, name_offsets, names);
  add_ragged(kCaptions, caption_offsets, captions);
  write_safetensors(path, tensors);
}

}  // namespace kiln
