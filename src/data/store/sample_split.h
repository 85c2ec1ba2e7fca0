// Samples of one data set that some are held out of. Torch-free.
#pragma once
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "data/store/sample_order.h"

namespace kiln {

enum class Split { kTraining, kHeldOut };

// Whether about `share` of all names holds this one out. A hash of the name decides: a sample stays where it
// is when others are added, in whatever order they come.
bool is_held_out(std::string_view name, double share);

// The samples of `lanes` that belong to a split. A lane may have none.
std::vector<SampleLane> split_lanes(const std::vector<SampleLane>& lanes, double share, Split split,
                                    const std::function<std::string(int64_t id)>& name_of);

// Samples of a pass over the lanes.
int64_t samples_per_pass(const std::vector<SampleLane>& lanes);

}  // namespace kiln
