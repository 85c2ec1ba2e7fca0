// The protocol of a result: everything besides the model that moves a metric. Its hash is the stamp. Results
// compare only under the same stamp. Torch-free.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "core/json.h"

namespace kiln {

// Returns {"metrics": {...}, "protocol": {...}, "stamp": hash of the protocol}.
nlohmann::json stamped(nlohmann::json metrics, nlohmann::json protocol);

// Describes the prompts that pictures were drawn for in turn: their number and a hash of their texts.
nlohmann::json prompts_protocol(const std::vector<std::string>& prompts);

// How samples of `kiln sample` were made. Null fields for other samples.
struct SampleOrigin {
  // Part of the protocol: sampler, steps, guidance, labels, uint8 rule, the average, precision, autoencoder.
  nlohmann::json protocol{};
  nlohmann::json subject{};  // weights, model, seed
};
// Reads their sampling.json. `path`: the samples' folder or .npz. PATH.json of an .npz overrides the
// folder's sampling.json.
SampleOrigin origin_of_samples(const std::string& path);

// Returns the fields of a protocol by their names: {"sampler.num_steps": 250}. A list is one field.
std::map<std::string, nlohmann::json> protocol_fields(const nlohmann::json& protocol);
// Returns a field's value in words. Of a long list its first and last entries and how many there are.
std::string field_text(const nlohmann::json& value);

// Returns "sampler.num_steps: 250 | 50" for every entry that differs. If empty, the results compare.
std::vector<std::string> protocol_differences(const nlohmann::json& a, const nlohmann::json& b);

// Returns a table of results side by side, and how their protocols differ. `names`: one per result. Throws
// Error if one is not a result.
std::string comparison_text(const std::vector<std::string>& names,
                            const std::vector<nlohmann::json>& results);

}  // namespace kiln
