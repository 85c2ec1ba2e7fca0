#include "extract/encoded_text.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <unordered_map>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "extract/settings.h"

namespace kiln {
namespace {

constexpr int64_t kMostSampled = 1024;  // samples whose captions stand for all

CaptionTable read_captions(const ImageDataset& dataset, const std::string& data,
                           const CaptionOptions& options) {
  check_caption_options(options);
  CaptionTable table;
  const auto num_pictures = static_cast<int64_t>(dataset.records().size());
  for (int64_t i = 0; i < num_pictures; ++i)
    table.add_sample(dataset.records()[i].name, captions_of(dataset, i, options));
  require_captions(table, data);
  return table;
}

std::string_view bytes_of(std::span<const int64_t> ids) {
  return {reinterpret_cast<const char*>(ids.data()), ids.size_bytes()};
}

}  // namespace

EncodedText::EncodedText(std::shared_ptr<const CaptionEncoder> encoder, const ImageDataset& dataset,
                         const std::string& data, const CaptionEncodingOptions& options, int64_t batch,
                         const std::string& compute_dtype)
    : EncodedText(std::move(encoder),
                  std::make_shared<const CaptionTable>(read_captions(dataset, data, options)), options, batch,
                  compute_dtype) {}

EncodedText::EncodedText(const EncodedText& captions, std::shared_ptr<const CaptionEncoder> encoder,
                         int64_t batch, const std::string& compute_dtype)
    : EncodedText(std::move(encoder), captions.table_, captions.options_, batch, compute_dtype) {}

EncodedText::EncodedText(std::shared_ptr<const CaptionEncoder> encoder,
                         std::shared_ptr<const CaptionTable> table, const CaptionEncodingOptions& options,
                         int64_t batch, const std::string& compute_dtype)
    : encoder_(std::move(encoder)),
      options_(options),
      batch_(batch),
      table_(std::move(table)),
      null_tokens_(tokens(kNullEntry)) {
  info_ = describe_text(*encoder_, options, compute_dtype);
  info_.captions_fingerprint = table_->fingerprint();
  info_.num_samples = table_->num_samples();
  info_.num_entries = table_->num_entries();
  info_.num_without_caption = table_->num_without_caption();
  info_.kinds = table_->kind_names();
}

template <class T>
std::span<const T> EncodedText::part(const std::vector<T>& column, int64_t sample) const {
  const auto first = static_cast<size_t>(table_->offsets().at(static_cast<size_t>(sample)));
  const auto last = static_cast<size_t>(table_->offsets().at(static_cast<size_t>(sample) + 1));
  return std::span(column).subspan(first, last - first);
}

std::span<const int64_t> EncodedText::entries(int64_t sample) const {
  return part(table_->entries(), sample);
}
std::span<const float> EncodedText::weights(int64_t sample) const { return part(table_->weights(), sample); }
std::span<const uint8_t> EncodedText::kinds(int64_t sample) const { return part(table_->kinds(), sample); }

text::TokenIds EncodedText::tokens(int64_t entry) const {
  int64_t num_cut = 0;
  return encoder_->tokens_of(table_->text(entry), num_cut);
}

std::vector<at::Tensor> EncodedText::encode_tokens(std::span<const text::TokenIds> ids) const {
  std::vector<at::Tensor> rows = encoder_->encode_tokens(ids, batch_, to_scalar_type(info_.dtype));
  for (const at::Tensor& of_one : rows)
    if (!at::isfinite(of_one).all().item<bool>())
      fail("loader",
           "the features of a caption are not finite in {}: choose another --text-dtype or --compute-dtype",
           dtype_name(info_.dtype));
  return rows;
}

std::span<const std::byte> EncodedText::rows(int64_t entry) const {
  const std::lock_guard lock(mutex_);
  auto found = kept_.find(entry);
  if (found == kept_.end()) {
    const text::TokenIds ids = tokens(entry);
    found = kept_.emplace(entry, encode_tokens({&ids, 1}).front().contiguous()).first;
  }
  return {static_cast<const std::byte*>(found->second.const_data_ptr()), found->second.nbytes()};
}

void EncodedText::encode(std::span<const int64_t> ids, std::span<const int32_t> offsets,
                         std::span<const uint8_t> dropped, std::span<std::byte> to) const {
  const size_t row_bytes = static_cast<size_t>(info_.width) * dtype_size(info_.dtype);
  const auto ids_of = [&](size_t caption) {
    return ids.subspan(static_cast<size_t>(offsets[caption]),
                       static_cast<size_t>(offsets[caption + 1] - offsets[caption]));
  };
  std::vector<text::TokenIds> different;
  std::unordered_map<std::string_view, size_t> number_of;
  for (size_t i = 0; i < dropped.size(); ++i) {
    const std::span<const int64_t> own = ids_of(i);
    if (dropped[i] || std::ranges::equal(own, null_tokens_)) continue;
    if (number_of.try_emplace(bytes_of(own), different.size()).second)
      different.emplace_back(own.begin(), own.end());
  }
  const std::vector<at::Tensor> encoded = encode_tokens(different);
  for (size_t i = 0; i < dropped.size(); ++i) {
    const std::span<const int64_t> own = ids_of(i);
    const auto place = to.subspan(static_cast<size_t>(offsets[i]) * row_bytes, own.size() * row_bytes);
    const auto found = number_of.find(bytes_of(own));
    if (dropped[i])
      std::ranges::fill(place, std::byte{0});
    else if (found == number_of.end())
      std::ranges::copy(rows(kNullEntry), place.begin());
    else
      std::memcpy(place.data(), encoded[found->second].const_data_ptr(), place.size());
  }
}

void EncodedText::rehearse(int64_t captions) const {
  const text::TokenIds longest(static_cast<size_t>(info_.max_tokens), 0);
  const std::vector<text::TokenIds> ids(static_cast<size_t>(std::min(captions, batch_)), longest);
  encoder_->encode_tokens(ids, batch_, to_scalar_type(info_.dtype));
}

std::string captions_fingerprint(const ImageDataset& dataset, const std::string& data,
                                 const CaptionOptions& options) {
  return read_captions(dataset, data, options).fingerprint();
}

SampledText sampled_shape(const EncodedText& text) {
  const TextStoreInfo& info = text.info();
  const int64_t count = std::min(info.num_samples, kMostSampled);
  int64_t num_captions = 0, num_rows = 0, num_cut = 0;
  for (int64_t i = 0; i < count; ++i)
    for (const int64_t entry : text.entries(i * info.num_samples / count)) {
      num_rows +=
          static_cast<int64_t>(text.encoder()->tokens_of(std::string(text.text(entry)), num_cut).size());
      ++num_captions;
    }
  const double all = static_cast<double>(std::max<int64_t>(num_captions, 1));
  return {.shape = {.width = info.width,
                    .max_rows = info.max_tokens,
                    .mean_rows = static_cast<double>(num_rows) / all,
                    .is_padded = info.padded,
                    .dtype = info.dtype,
                    .hidden_rows = text.encoder()->num_hidden_tokens()},
          .cut_share = static_cast<double>(num_cut) / all};
}

}  // namespace kiln
