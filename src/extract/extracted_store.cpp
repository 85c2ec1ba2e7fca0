#include "extract/extracted_store.h"

#include <filesystem>

#include "core/tensors.h"

namespace kiln {

StoreInfo make_store_info(const ExtractOptions& options, const ExtractSettings& settings,
                          const ImageDataset& dataset, const Autoencoder& autoencoder,
                          const PictureLanes& lanes) {
  StoreInfo info;
  info.autoencoder = autoencoder.name;
  info.autoencoder_fingerprint = autoencoder.fingerprint;
  if (options.autoencoder != "pixels")
    info.autoencoder_path = std::filesystem::absolute(options.autoencoder).lexically_normal().string();
  info.scaling_factor = autoencoder.scaling_factor;
  info.shift_factor = autoencoder.shift_factor;
  info.channels = autoencoder.latent_channels;
  info.lanes = lanes.latent_lanes();
  info.image_size = lanes.image_size();
  info.has_image_size = lanes.has_buckets();
  info.has_logvar = autoencoder.has_posterior;
  info.num_flips = settings.num_flips;
  info.dtype = from_scalar_type(parse_compute_dtype(options.dtype, "--dtype"));
  info.class_names = dataset.class_names();
  info.source = {{"data", std::filesystem::absolute(options.data).lexically_normal().filename().string()},
                 {"layout", dataset.layout()},
                 {"num_images", dataset.records().size()},
                 {"images_xxh3", dataset_fingerprint(dataset)},
                 {"device", settings.device.is_cuda() ? "cuda" : "cpu"},
                 {"compute_dtype", options.compute_dtype},
                 {"batch", settings.batch},
                 {"exif_orientation", options.exif_orientation}};
  if (lanes.has_buckets())
    info.source.update({{"buckets", options.buckets},
                        {"bucket_min", options.bucket_min},
                        {"buckets_xxh3", lanes.fingerprint()}});
  if (options.enlarge) info.source["enlarge"] = true;
  if (options.tiles != "auto") info.source["tiles"] = options.tiles;
  if (options.tf32 && settings.device.is_cuda()) info.source["tf32"] = true;
  return info;
}

}  // namespace kiln
