#include "data/store_shard.h"

#include <fmt/ranges.h>

#include "core/error.h"

namespace kiln {
namespace {

constexpr const char* kMean = "mean";
constexpr const char* kLogvar = "logvar";
constexpr const char* kLabels = "class_labels";
constexpr const char* kNames = "name";
constexpr const char* kCaptions = "caption";

std::vector<int64_t> latents_shape(const StoreInfo& info, int64_t num_samples) {
  return {num_samples, info.num_flips, info.channels, info.height, info.width};
}

}  // namespace

StoreShard::StoreShard(std::unique_ptr<TensorFile> file, const StoreInfo& info, int64_t num_samples,
                       const std::string& where)
    : file_(std::move(file)),
      where_(where),
      num_samples_(num_samples),
      num_flips_(info.num_flips),
      latent_bytes_(info.latent_size() * static_cast<int64_t>(dtype_size(info.dtype))) {
  const std::vector<int64_t> shape = latents_shape(info, num_samples);
  mean_ = tensor(kMean, info.dtype, shape).data();
  if (info.has_logvar) logvar_ = tensor(kLogvar, info.dtype, shape).data();
  labels_ = reinterpret_cast<const int64_t*>(tensor(kLabels, Dtype::kI64, {num_samples}).data());
  names_ = ragged(kNames);
  captions_ = ragged(kCaptions);
  const auto num_classes = static_cast<int64_t>(info.class_names.size());
  for (int64_t i = 0; i < num_samples; ++i) {
    if (labels_[i] < -1 || labels_[i] >= num_classes) {
      fail("feature store", "expected a label from -1 to {} for sample {:?}, got {} ({})", num_classes - 1,
           name(i), labels_[i], where);
    }
  }
}

std::span<const std::byte> StoreShard::tensor(const std::string& name, Dtype dtype,
                                              const std::vector<int64_t>& shape) const {
  const auto found = file_->tensors().find(name);
  if (found == file_->tensors().end())
    fail("feature store", "expected tensor {:?}, got none ({})", name, where_);
  const TensorView& view = found->second;
  if (view.dtype != dtype || view.shape != shape) {
    fail("feature store", "expected {} {} ({}), got {} ({}) ({})", name, dtype_name(dtype),
         fmt::join(shape, ", "), dtype_name(view.dtype), fmt::join(view.shape, ", "), where_);
  }
  if (reinterpret_cast<uintptr_t>(view.bytes.data()) % dtype_size(dtype) != 0) {
    fail("feature store",
         "{} does not begin at a multiple of its element size ({}): it was not written by kiln", name,
         where_);
  }
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

void ShardColumns::append(std::span<const std::byte> mean_bytes, std::span<const std::byte> logvar_bytes,
                          int64_t label, std::string_view name, std::string_view caption) {
  mean.insert(mean.end(), mean_bytes.begin(), mean_bytes.end());
  logvar.insert(logvar.end(), logvar_bytes.begin(), logvar_bytes.end());
  labels.push_back(label);
  names.append(name);
  captions.append(caption);
  name_offsets.push_back(static_cast<int64_t>(names.size()));
  caption_offsets.push_back(static_cast<int64_t>(captions.size()));
}

void ShardColumns::clear() {
  mean.clear();
  logvar.clear();
  labels.clear();
  names.clear();
  captions.clear();
  name_offsets.assign(1, 0);
  caption_offsets.assign(1, 0);
}

void ShardColumns::write(const std::string& path, const StoreInfo& info) const {
  const int64_t n = num_samples();
  const std::vector<int64_t> latents = latents_shape(info, n);
  std::vector<NamedTensor> tensors;
  tensors.push_back({kMean, {info.dtype, latents, mean}});
  if (info.has_logvar) tensors.push_back({kLogvar, {info.dtype, latents, logvar}});
  tensors.push_back({kLabels, {Dtype::kI64, {n}, std::as_bytes(std::span(labels))}});
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
