// The stamp of a result: everything that moves a metric beside the model that is judged. Results compare only
// under one stamp. Torch-free.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kiln {

// {"metrics": {...}, "protocol": {...}, "stamp": hash of the protocol, ...}
nlohmann::json stamped(nlohmann::json metrics, nlohmann::json protocol);

// What pictures were drawn in turn for: how many texts, and a hash of them.
nlohmann::json prompts_protocol(const std::vector<std::string>& prompts);

// How samples of `kiln sample` were made, of their sampling.json (`path`: the samples' folder or .npz; of the
// latter its own PATH.json goes before the folder's): the protocol's part of it, and what was judged. All
// null for others.
struct SampleOrigin {
  nlohmann::json
      protocol{};  // sampler, steps, guidance, labels, uint8 rule, the average, precision, autoencoder
  nlohmann::json subject{};  // weights, model, seed
};
SampleOrigin origin_of_samples(const std::string& path);

// "sampler.num_steps: 250 | 50" for every entry that differs; empty: the results compare.
std::vector<std::string> protocol_differences(const nlohmann::json& a, const nlohmann::json& b);

// A table of results side by side, and what their protocols differ in. `names`: of each result. Throws Error
// when one is no result.
std::string comparison_text(const std::vector<std::string>& names,
                            const std::vector<nlohmann::json>& results);

}  // namespace kiln
