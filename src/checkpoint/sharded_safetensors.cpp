#include <filesystem>

#include "checkpoint/safetensors.h"
#include "checkpoint/weights_file.h"
#include "core/error.h"
#include "core/files/mapped_file.h"
#include "core/text/json_text.h"

namespace kiln {
namespace {

using nlohmann::json;

class ShardedSafetensors : public TensorFile {
 public:
  explicit ShardedSafetensors(const std::string& path) {
    const MappedFile file("safetensors index", path);
    const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
    const json index = parse_json("safetensors index", text, path, {.refuses_duplicates = true});
    if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
      fail("safetensors index", "expected an object with \"weight_map\" ({})", path);
    for (const auto& [key, shard] : index["weight_map"].items()) {
      if (!shard.is_string())
        fail("safetensors index", "the shard of {:?} is not a file name ({})", key, path);
      add(key, shard.get<std::string>(), path);
    }
  }

 private:
  void add(const std::string& key, const std::string& shard, const std::string& path) {
    // A name only: an index must not reach out of its folder.
    if (shard.empty() || shard == "." || shard == ".." || shard.find('/') != std::string::npos)
      fail("safetensors index", "shard {:?} of {:?} is not a plain file name ({})", shard, key, path);
    auto& file = shards_[shard];
    if (!file) {
      const std::filesystem::path shard_path = std::filesystem::path(path).parent_path() / shard;
      if (!std::filesystem::exists(shard_path))
        fail("safetensors index", "shard {:?} is missing ({}): copy it beside the index", shard, path);
      file = shard.ends_with(".bin") ? open_pt(shard_path.string()) : open_safetensors(shard_path.string());
    }
    const auto found = file->tensors().find(key);
    if (found == file->tensors().end())
      fail("safetensors index", "tensor {:?} is not in its shard {:?} ({})", key, shard, path);
    tensors_.insert(*found);
  }

  std::map<std::string, std::unique_ptr<TensorFile>> shards_;
};

}  // namespace

std::unique_ptr<TensorFile> open_safetensors_index(const std::string& path) {
  return std::make_unique<ShardedSafetensors>(path);
}

}  // namespace kiln
