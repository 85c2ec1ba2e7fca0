// The feature networks by name: an explicit table.
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
  bool statistics_are_published;  // those of an .npz that holds pictures too are of this net
  std::unique_ptr<FeatureNet> (*load)(const std::string& weights, const std::string& resize,
                                      at::Device device);
  // The same without weights, on meta, for plans: of the architecture at `weights` where that lies here.
  std::unique_ptr<FeatureNet> (*outline)(const std::string& weights, const std::string& resize);
};
const std::vector<FeatureNetKind>& feature_net_kinds();
// Throws Error listing the known names.
const FeatureNetKind& feature_net_kind(const std::string& name);

// `weights`: "" for a net that needs none. `resize`: "" for its default. Throws Error.
std::unique_ptr<FeatureNet> load_feature_net(const std::string& name, const std::string& weights,
                                             const std::string& resize, at::Device device);
// The same on meta: it computes shapes. Weights that do not lie here are taken to be Inception's, or those of
// DINOv2's ViT-B/14. Throws Error.
std::unique_ptr<FeatureNet> outline_feature_net(const std::string& name, const std::string& weights);

}  // namespace kiln
