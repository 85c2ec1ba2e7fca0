// What samples are judged by.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "evaluate/evaluation.h"

namespace kiln {

// The needs of `choice` from pictures (a folder, cropped to `crop`, or an .npz) and from the statistics of an
// .npz. Statistics of a file are taken where they are of the net and suffice: ADM's hold those of the whole
// training set beside pictures of a part of it. What statistics alone cannot give stays absent. A collective.
// Throws Error: what read_statistics() and PictureSource refuse.
PictureSet measure_reference(const std::string& path, int64_t crop, const FeatureNet& net,
                             const MetricChoice& choice, const ExtractionOptions& options,
                             ProcessGroup& group);

// All that a result was measured by. `sampling`: how the samples were drawn (SampleOrigin::protocol), null
// where that is not known.
nlohmann::json protocol_of(const FeatureNet& net, const MetricChoice& choice, const PictureSet& samples,
                           const PictureSet& reference, int64_t crop, const nlohmann::json& sampling);

}  // namespace kiln
