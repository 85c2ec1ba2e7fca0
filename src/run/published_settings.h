// What a run takes from the published models of its family where the user leaves it open.
#pragma once
#include <optional>
#include <set>
#include <string>

#include "core/json.h"
#include "models/model.h"
#include "models/model_record.h"
#include "run/train_options.h"

namespace kiln {

// Sets the objective, its schedule and how grids are drawn, as far as `given` (names of options) leaves them
// open. The values are those of `recorded` (option -> value, of the run that is resumed; null: it begins),
// else those of the family's published models. A given objective keeps the published schedule if it has one
// of that kind. A model that the registry does not know changes nothing. Returns the options that are not the
// program's defaults now as "--objective flow --flow-shift 3.0", or "".
std::string take_published_settings(TrainOptions& options, const std::set<std::string>& given,
                                    const nlohmann::json& recorded = nullptr);

// Returns the config (make_objective) of the published models of this name. `objective`: one of
// objective_names(), which then takes their schedule; empty: theirs too. Throws Error.
nlohmann::json published_objective_config(const std::string& model, const std::string& objective);

// How pictures are drawn unless the user says otherwise.
struct Drawing {
  std::string sampler;
  int64_t num_sampling_steps = 0;
  double cfg_scale = 1;
  bool is_published = false;  // else the published sampler does not fit the objective, or another is given
  bool is_recorded = false;   // of the weights themselves
};
// Returns how published models of this name are drawn with. If another `sampler` is given (not empty), or
// theirs does not fit the objective, the steps are that sampler's usual ones. `objective`: make_objective's
// config.
Drawing published_drawing(const std::string& model, const nlohmann::json& objective,
                          const std::string& sampler = "");
// The same for weights with a record: as that says, and where it says nothing as published.
Drawing drawing_of(const ModelRecord& record, const nlohmann::json& objective,
                   const std::string& sampler = "");

// Says which objective weights were trained with where they do not.
struct GivenObjective {
  std::string name;  // one of objective_names(); "" = as they say
  std::optional<double> flow_shift{};
};
// Returns the objective of weights of this model: the given one, the record's, or that of the scheduler
// beside them (scheduler_config.json, or null). A given one keeps their schedule if that is of its kind. A
// scheduler that draws as the published models of this name are drawn stands for their objective, which says
// more. Null if nothing tells. Throws Error.
nlohmann::json objective_of(const ModelRecord& record, const nlohmann::json& scheduler,
                            const std::string& model, const GivenObjective& given);
// Returns the options of training ("objective", "flow-shift", ...) that give an objective (make_objective's
// config); {} where none do.
nlohmann::json options_of(const nlohmann::json& objective);
// Returns "flow, shift 3".
std::string objective_text(const nlohmann::json& objective);

// Returns what a record says of drawing with a model of this shape.
ModelRecord::DrawingInfo drawing_info(const Drawing& drawing, const DenoiserShape& shape);

}  // namespace kiln
