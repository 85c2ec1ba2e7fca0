#include "objective_io.h"
#include "core/aten.h"

#include "core/error.h"
#include "core/json_config.h"

namespace kiln::conformance {

RecordedObjective parse_objective(const nlohmann::json& config) {
  RecordedObjective recorded{.objective = make_objective(config)};
  const JsonConfig reader("loss", config);
  const auto type = reader.require<std::string>("type");
  recorded.is_iddpm = type == "iddpm";
  recorded.takes_uniforms = type == "flow" && reader.get<std::string>("mode", "continuous") == "continuous";
  recorded.num_train_timesteps = reader.positive("num_train_timesteps", 1000);
  return recorded;
}

at::Tensor RecordedObjective::timesteps(const Inputs& inputs, at::IntArrayRef sizes) const {
  if (takes_uniforms)
    return objective->timesteps(inputs.get("u", sizes).to(at::kDouble).flatten()).view(sizes);
  const at::Tensor t = inputs.get_integers("t", sizes);
  const int64_t first = t.min().item<int64_t>(), last = t.max().item<int64_t>();
  if (first < 0 || last >= num_train_timesteps)
    fail("loss", "expected t in 0..{}, got {}..{} in {}", num_train_timesteps - 1, first, last,
         inputs.path());
  return t;
}

}  // namespace kiln::conformance
