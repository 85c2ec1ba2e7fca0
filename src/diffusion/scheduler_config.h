// Objectives as diffusers' scheduler_config.json tells them.
#pragma once
#include "core/json.h"

namespace kiln {

// Returns the noise schedule of a model's training (make_objective's config, not of type flow), in the keys
// of a diffusers scheduler.
nlohmann::json scheduler_of(const nlohmann::json& objective);

// The key of a scheduler that stands in for one that nobody knows. diffusers skips keys that begin so.
inline constexpr const char* kAssumedKey = "_kiln_assumed";

// Returns the objective (make_objective's config) of models that a scheduler draws with, as far as its config
// tells. Null for one that no objective of Kiln has, and for one with kAssumedKey.
nlohmann::json objective_of_scheduler(const nlohmann::json& scheduler);

// True if models of both objectives (make_objective's configs) are drawn alike: the same prediction, schedule
// and shift.
bool have_same_schedule(const nlohmann::json& objective, const nlohmann::json& other);

}  // namespace kiln
