#include "train/dataset/sample_captions.h"

#include "data/images/image_dataset.h"
#include "data/store/sample_order.h"
#include "train/encoding/encoded_captions.h"

namespace kiln {

namespace {

// Returns `count` of the samples of [0, size) that the validation holds out, evenly spread, or all if there
// are no more. If it holds none out, all samples may be among them.
template <class Name>
std::vector<int64_t> judged_samples(double share, int64_t size, int64_t count, const Name& name_of) {
  std::vector<int64_t> samples, chosen;
  for (int64_t id = 0; id < size; ++id)
    if (share == 0 || is_held_out(name_of(id), share)) samples.push_back(id);
  const auto all = static_cast<int64_t>(samples.size());
  if (count >= all) return samples;
  for (int64_t i = 0; i < count; ++i) chosen.push_back(samples[static_cast<size_t>(i * all / count)]);
  return chosen;
}

std::vector<std::string> texts_of(const StoredData& data, const TrainOptions& options, const DataAsks& asks,
                                  int64_t count) {
  const auto text = describe(data, asks).text;
  const auto store = open_sources(data.stores());
  const std::string_view prefix = text->info().prefix, suffix = text->info().suffix;
  std::vector<std::string> captions;
  const auto name_of = [&](int64_t sample) { return store->sample_name(sample); };
  for (const int64_t id : judged_samples(options.validation.share, store->size(), count, name_of)) {
    std::string_view caption = text->text(text->entry(id, 0));
    if (caption.starts_with(prefix)) caption.remove_prefix(prefix.size());
    if (caption.ends_with(suffix)) caption.remove_suffix(suffix.size());
    if (!caption.empty()) captions.emplace_back(caption);
  }
  return captions;
}

std::vector<std::string> texts_of(const PictureData& data, const TrainOptions& options, const DataAsks&,
                                  int64_t count) {
  const auto images = ImageDataset::open(data.options.path);
  CaptionOptions bare = data.options.captions;
  bare.prefix = bare.suffix = "";
  std::vector<std::string> captions;
  const auto& records = images->records();
  const auto name_of = [&](int64_t sample) { return records[static_cast<size_t>(sample)].name; };
  for (const int64_t id : judged_samples(options.validation.share, std::ssize(records), count, name_of))
    if (const std::vector<Caption> found = captions_of(*images, id, bare); !found.empty())
      captions.push_back(found.front().text);
  return captions;
}

std::vector<std::string> texts_of(const SyntheticData&, const TrainOptions&, const DataAsks&, int64_t) {
  return {};
}

}  // namespace

std::vector<std::string> spread_captions(const TrainOptions& options, const DataAsks& asks, int64_t count) {
  return std::visit([&](const auto& data) { return texts_of(data, options, asks, count); },
                    source_of(options.data));
}

}  // namespace kiln
