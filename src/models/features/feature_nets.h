// The table of feature networks by name.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "models/features/feature_net.h"

namespace kiln {

struct FeatureNetKind {
  const char* name;
  std::vector<std::string> resizes;  // the first one is the default
  bool takes_weights;
  bool has_logits, has_spatial;
  bool statistics_are_published;  // statistics in an .npz with pictures are from this net
  std::unique_ptr<FeatureNet> (*load)(const std::string& weights, const std::string& resize,
                                      at::Device device);
  // Makes the net on meta, without weights, for plans. Takes the architecture from the file `weights` if that
  // exists.
  std::unique_ptr<FeatureNet> (*outline)(const std::string& weights, const std::string& resize);
};
const std::vector<FeatureNetKind>& feature_net_kinds();
// Returns the kind of that name. Throws Error listing the known names.
const FeatureNetKind& feature_net_kind(const std::string& name);

// Loads a net. `weights`: "" for a net that needs none. `resize`: "" for its default. Throws Error.
std::unique_ptr<FeatureNet> load_feature_net(const std::string& name, const std::string& weights,
                                             const std::string& resize, at::Device device);
// Makes a net on meta, which computes shapes only. If the file `weights` does not exist, assumes the
// published Inception, or DINOv2's ViT-B/14. Throws Error.
std::unique_ptr<FeatureNet> outline_feature_net(const std::string& name, const std::string& weights);

}  // namespace kiln
