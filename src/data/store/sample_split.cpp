#include "data/store/sample_split.h"

#include <xxhash.h>

#include <cmath>
#include <memory>

namespace kiln {

bool is_held_out(std::string_view name, double share) {
  return std::ldexp(static_cast<double>(XXH3_64bits(name.data(), name.size())), -64) < share;
}

std::vector<SampleLane> split_lanes(const std::vector<SampleLane>& lanes, double share, Split split,
                                    const std::function<std::string(int64_t)>& name_of) {
  std::vector<SampleLane> parts(lanes.size());
  for (size_t lane = 0; lane < lanes.size(); ++lane)
    for (const SampleRange& range : lanes[lane].samples) {
      auto chosen = std::make_shared<std::vector<int64_t>>();
      for (int64_t i = 0; i < range.count; ++i)
        if (is_held_out(name_of(range.sample(i)), share) == (split == Split::kHeldOut))
          chosen->push_back(range.sample(i));
      if (chosen->empty()) continue;
      const int64_t first = chosen->front(), count = static_cast<int64_t>(chosen->size());
      parts[lane].samples.push_back(
          {.first = first, .count = count, .weight = range.weight, .chosen = std::move(chosen)});
    }
  return parts;
}

int64_t samples_per_pass(const std::vector<SampleLane>& lanes) {
  int64_t samples = 0;
  for (const SampleLane& lane : lanes) samples += lane.size();
  return samples;
}

}  // namespace kiln
