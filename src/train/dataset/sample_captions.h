// Captions of a run's samples as texts, to draw pictures with.
#pragma once
#include <string>
#include <vector>

#include "train/dataset/data_description.h"

namespace kiln {

// Returns up to `count` captions, without the prefix and suffix that the run puts around them, spread over
// the samples of --data that --validation-share holds out, or over all if it holds none out. Throws Error as
// describe() does.
std::vector<std::string> spread_captions(const TrainOptions& options, const DataAsks& asks, int64_t count);

}  // namespace kiln
