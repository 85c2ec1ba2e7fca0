// Which metrics a feature net gives, what they need of each side, and their values.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "evaluate/picture_set.h"
#include "models/features/feature_nets.h"

namespace kiln {

struct MetricChoice {
  std::vector<std::string> names{};  // fid | sfid | inception_score | precision_recall | kid
  int64_t splits = 10, k = 3;

  bool has(const std::string& name) const;
};
// `names`: empty = all that the net has. Throws Error naming an unknown one, or one that the net cannot give.
MetricChoice choose_metrics(const FeatureNetKind& net, const std::vector<std::string>& names);

PictureSetNeeds needs_of_samples(const MetricChoice& choice);
PictureSetNeeds needs_of_reference(const MetricChoice& choice);

// {"fid": 2.27, ...}; on nets other than Inception a Frechet distance is "fd_<net>", a kernel distance
// "kd_<net>". Leaves out what a reference of statistics alone cannot give. Throws Error when the reference's
// features are of another width.
nlohmann::json metric_values(const MetricChoice& choice, const std::string& net, const PictureSet& samples,
                             const PictureSet& reference);

}  // namespace kiln
