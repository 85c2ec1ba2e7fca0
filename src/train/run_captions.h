// Captions of a run's own data, for pictures that are to be judged beside that data.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kiln {

struct RunCaptions {
  std::vector<std::string> texts{};  // without the prefix and suffix that the run puts around captions
  std::string origin{};              // "captions that --validation-share 0.1 holds out of store"
};

// Returns up to `count` captions spread over the samples that the run in `run` validates on, else over those
// that it trains on. No texts if the run takes no captions or its data are synthetic. Throws Error saying to
// give --prompts: the data are not there any more, or have no captions.
RunCaptions captions_of_run(const std::string& run, int64_t count);

}  // namespace kiln
