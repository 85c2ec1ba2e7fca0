// store.json, which describes a feature store. Torch-free.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/json.h"
#include "data/store/data_shape.h"
#include "data/store/sample_order.h"

namespace kiln {

// The content of store.json, which a reader must check before it trains on the shards.
struct StoreInfo {
  std::string autoencoder;              // "autoencoder_kl" | "pixels"
  std::string autoencoder_fingerprint;  // xxh3 of its weights; "" = unknown (imports)
  // The path of its file or folder; "" = none (pixels, imports). A hint for decoding, to be checked by the
  // fingerprint. Equal stores may differ in it.
  std::string autoencoder_path;
  double scaling_factor = 1, shift_factor = 0;
  int64_t channels = 0;         // of a latent
  std::vector<Lane> lanes{};    // shapes of the latents; a shard holds latents of one lane
  int64_t image_size = 0;       // pixels; with several lanes, the side of a square of about their area
  bool has_logvar = true;       // false: features are plain latents (pixels, fast-DiT imports)
  bool already_scaled = false;  // the latents are scaled already (fast-DiT imports)
  bool has_image_size = false;  // the size of every sample's original picture is known
  int64_t num_flips = 1;        // 2: each image is stored as is and mirrored (--flip both)
  Dtype dtype = Dtype::kF32;    // of mean and logvar: F32, BF16 or F16
  int64_t num_samples = 0;
  std::vector<std::string> class_names;  // empty: no labels
  struct Shard {
    std::string file;
    int64_t num_samples = 0;
    std::string xxh3;  // of the file's bytes, 16 hexadecimal digits
    int64_t lane = 0;  // index into lanes
    // Covers its columns but mean and logvar. It is "" in a store of an earlier version, whose labels and
    // names cannot be checked where they are read.
    std::string columns_xxh3{};
  };
  std::vector<Shard> shards;
  nlohmann::json source;  // where the images came from, for people
  bool complete = false;  // false: the extraction was interrupted or still runs

  // Elements of a latent.
  int64_t latent_size(int64_t lane = 0) const { return channels * lanes[static_cast<size_t>(lane)].area(); }
  // The samples of each lane, in the order of `lanes`.
  std::vector<SampleLane> sample_lanes() const;
  // Removes the lanes without samples, from which no batch can be made. Every picture of a lane may have been
  // left out.
  void drop_empty_lanes();
};

// True if the folder is a feature store, maybe an unfinished one.
bool is_store(const std::string& folder);
// Parses store.json and checks every field and their sums. Does not touch the shards. `where` names the text
// in messages. Throws Error.
StoreInfo parse_store_info(std::string_view text, const std::string& where);
// Reads folder/store.json, also of an unfinished store.
StoreInfo read_store_info(const std::string& folder);
std::string store_info_text(const StoreInfo& info);

}  // namespace kiln
