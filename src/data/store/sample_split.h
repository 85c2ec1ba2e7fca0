// Splits the samples of a data set into those to train on and those held out. Torch-free.
#pragma once
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "data/store/sample_order.h"

namespace kiln {

enum class Split { kTraining, kHeldOut };

// True if the sample of this name is held out, as about `share` of all names are. A hash of the name decides,
// so a sample stays in its split when others are added, in any order.
bool is_held_out(std::string_view name, double share);

// Returns the samples of `lanes` that belong to a split. A lane may have none.
std::vector<SampleLane> split_lanes(const std::vector<SampleLane>& lanes, double share, Split split,
                                    const std::function<std::string(int64_t id)>& name_of);

// Returns the number of samples of a pass over the lanes.
int64_t samples_per_pass(const std::vector<SampleLane>& lanes);

}  // namespace kiln
