// The metrics that a feature net gives, the reference that samples are judged by, and the values of metrics.
#pragma once
#include <string>
#include <vector>

#include "core/json.h"
#include "evaluate/picture_set.h"
#include "models/features/feature_nets.h"

namespace kiln {

struct MetricChoice {
  std::vector<std::string> names{};  // fid | sfid | inception_score | precision_recall | kid
  int64_t splits = 10, k = 3;

  bool has(const std::string& name) const;
};
// Chooses metrics by name; empty = all metrics of the net. Throws Error naming a metric that is unknown or
// that the net cannot give.
MetricChoice choose_metrics(const FeatureNetKind& net, const std::vector<std::string>& names);

PictureSetNeeds needs_of_samples(const MetricChoice& choice);
PictureSetNeeds needs_of_reference(const MetricChoice& choice);

// Measures what `choice` needs of the reference at `path`: a folder of pictures, cropped to `crop`, or an
// .npz with pictures, statistics or both. Prefers the file's statistics if they fit the net: ADM's files hold
// those of the whole training set beside pictures of a part of it. What statistics alone cannot give stays
// absent. A collective. Throws Error: what read_statistics() and PictureSource refuse.
PictureSet measure_reference(const std::string& path, int64_t crop, const FeatureNet& net,
                             const MetricChoice& choice, const ExtractionOptions& options,
                             ProcessGroup& group);

// Returns {"fid": 2.27, ...}. With nets other than Inception, a Frechet distance is "fd_<net>" and a kernel
// distance "kd_<net>". Leaves out what a reference of statistics alone cannot give. Throws Error if the
// reference's features have another width.
nlohmann::json metric_values(const MetricChoice& choice, const std::string& net, const PictureSet& samples,
                             const PictureSet& reference);

// Describes how a result was measured. `sampling`: how the samples were drawn (SampleOrigin::protocol), null
// if that is not known.
nlohmann::json protocol_of(const FeatureNet& net, const MetricChoice& choice, const PictureSet& samples,
                           const PictureSet& reference, int64_t crop, const nlohmann::json& sampling);

}  // namespace kiln
