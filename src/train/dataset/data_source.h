// Where the samples of a run come from. source_of() alone looks at paths to tell.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "data/store/store_source.h"
#include "run/train_options.h"

namespace kiln {

// Random samples: --data synthetic, or what a plan without data is about.
struct SyntheticData {
  DataOptions options{};
};
// A feature store, with those of --more-data.
struct StoredData {
  DataOptions options{};
  std::vector<StoreSource> stores() const;  // --data first
};
// Pictures that are decoded while training. Without a path they are a plan's, which are not here.
struct PictureData {
  DataOptions options{};
  bool are_encoded() const { return !options.in_pixels(); }  // else they are their own latents
};
using DataSource = std::variant<SyntheticData, StoredData, PictureData>;

// Returns what --data is. A path without anything counts as pictures, which require_here() refuses. Without a
// path an autoencoder says that a plan is about pictures.
DataSource source_of(const DataOptions& options);
// Returns the options of the samples to validate on, each once: --validation-data, or with a share of --data
// held out all of --data.
DataOptions held_out_options(DataOptions data, const ValidationOptions& validation);

// True if all paths of the data exist, or they need none.
bool is_here(const DataOptions& options);
// Throws Error saying what to do: nothing at a path, a run's folder, pictures without an autoencoder or
// synthetic data with one, --more-data that are no stores or not beside one.
void require_here(const DataSource& source);
// Throws Error if an autoencoder is given and not here. A plan assumes a published one in its place; a run
// needs it.
void require_autoencoder(const DataOptions& data);

bool reads_pictures(const DataSource& source);
// True if an autoencoder encodes pictures on the way.
bool encodes_pictures(const DataSource& source);
// True if one encodes pictures at every validation.
bool encodes_held_out(const DataOptions& data, const ValidationOptions& validation);
// Returns lines such as "--buckets has no effect on features: use kiln extract --buckets".
std::vector<std::string> data_settings_without_effect(const DataOptions& data,
                                                      const ValidationOptions& validation);
// Returns the side in pixels that a store's pictures were brought to; nothing if --data is no store. Throws
// Error for a store that cannot be read.
std::optional<int64_t> stored_image_size(const DataOptions& options);

}  // namespace kiln
