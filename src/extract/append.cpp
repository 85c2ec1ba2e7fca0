#include "extract/extract.h"

#include <filesystem>
#include <unordered_map>

#include "core/error.h"
#include "data/store/store_source.h"
#include "data/text_store/text_store_info.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

class SomePictures : public ImageDataset {
 public:
  SomePictures(std::shared_ptr<const ImageDataset> all, const std::vector<int64_t>& indices)
      : all_(std::move(all)), indices_(indices) {
    class_names_ = all_->class_names();
    for (const int64_t index : indices_) records_.push_back(all_->records()[static_cast<size_t>(index)]);
  }
  const char* layout() const override { return all_->layout(); }
  PictureBytes bytes(int64_t index) const override {
    return all_->bytes(indices_.at(static_cast<size_t>(index)));
  }

 private:
  const std::shared_ptr<const ImageDataset> all_;
  const std::vector<int64_t> indices_;
};

// Returns the name of a folder of pictures in the form that a store keeps.
std::string folder_name(const std::string& data) {
  return fs::absolute(data).lexically_normal().filename().string();
}

// Returns the names of all samples, each with the folder that it came from.
std::unordered_map<std::string, std::string> origins(const std::string& store) {
  std::unordered_map<std::string, std::string> found;
  for (const std::string& part : store_parts(store)) {
    const auto opened = FeatureStore::open(part);
    const nlohmann::json& source = opened->info().source;
    const std::string data = source.is_object() ? source.value("data", "") : "";
    for (int64_t sample = 0; sample < opened->size(); ++sample)
      found.emplace(opened->sample_name(sample), data);
  }
  return found;
}

// Returns the folder for the next part of a store.
std::string next_part(const std::string& store) {
  if (!is_store(store))
    fail("extract", "--append adds to a store, and {} is none: leave --append out", store);
  if (!read_store_info(store).complete)
    fail("extract", "--append: {} is unfinished: run the command that began it again first", store);
  return appended_part_folder(store, static_cast<int64_t>(store_parts(store).size()));
}

std::string last_part(const std::string& store) { return store_parts(store).back(); }

// Returns the pictures of --data that are not in the store; null when all are.
std::shared_ptr<const ImageDataset> new_pictures(std::shared_ptr<const ImageDataset> dataset,
                                                 const std::string& data, const std::string& store) {
  const auto known = origins(store);
  std::vector<int64_t> indices;
  for (size_t i = 0; i < dataset->records().size(); ++i) {
    const std::string& name = dataset->records()[i].name;
    const auto found = known.find(name);
    if (found == known.end())
      indices.push_back(static_cast<int64_t>(i));
    else if (found->second != folder_name(data))
      fail("extract",
           "--append: {} of {} has the name of a sample of {} from the folder {:?}: rename the picture, or "
           "give the same pictures in a folder of that name",
           name, data, store, found->second);
  }
  if (indices.empty()) return nullptr;
  return std::make_shared<const SomePictures>(std::move(dataset), indices);
}

// Returns a line for each text store that the new samples lack.
std::string missing_captions_text(const std::string& store, const std::string& data) {
  std::string text;
  for (const std::string& name : find_text_stores(store))
    if (!fs::exists(fs::path(text_store_folder(last_part(store), name)) / "text.json"))
      text += fmt::format(
          "the new samples have no captions in text-{} yet: run kiln extract --append --data {} --out {} "
          "--text-encoder DIR --text-name {}\n",
          name, data, store, name);
  return text;
}

}  // namespace

void append_pictures(const ExtractOptions& options, const std::shared_ptr<const ImageDataset>& pictures,
                     ProcessGroup& group, const FeatureExtractor& extract_features) {
  const std::string &store = options.out, part = next_part(store);
  if (!options.autoencoder.empty()) {
    const std::shared_ptr<const ImageDataset> fresh = new_pictures(pictures, options.data, store);
    if (!fresh && group.rank() == 0) fmt::print("{} has all pictures of {} already\n", store, options.data);
    if (fresh) {
      ExtractOptions of_part = options;
      of_part.out = part;
      extract_features(of_part, fresh);
      if (last_part(store) != part) return;  // stopped
    }
  }
  if (!options.text.encoder.empty())
    extract_text(options, *pictures, last_part(store), group, store);
  else if (group.rank() == 0)
    fmt::print("{}", missing_captions_text(store, options.data));
}

}  // namespace kiln
