// A model's weights under its own keys, from any source of weights.
#pragma once
#include <optional>
#include <string>

#include "core/json.h"
#include "models/family.h"
#include "models/lora_keys.h"
#include "models/weights_source.h"

namespace kiln {

struct LoadModelOptions {
  bool ema = true;                                   // of a file that holds both
  std::string model{};                               // name in the registry; "" = as the source says
  nlohmann::json config = nlohmann::json::object();  // overrides what the source says
  std::string base{};                                // of an adapter's run; "" = where it was
  bool anyway = false;                               // an adapter's base may be another one
};

struct LoadedModel {
  TensorMap weights;               // published keys where the architecture is known
  const Family* family = nullptr;  // null: unknown
  std::string name{};              // in the registry
  std::string path{};              // of the weights
  RecognisedModel model{};
  // False: the model has null rows and the source does not. The weights have zeros there.
  bool has_null_rows = true;

  LoraBase base() const { return {family, model.config}; }
};

// Loads the weights, an adapter's merged into its base. Throws Error: the weights are of another model than
// options.model or do not fit the config; an adapter's base is missing or another one. Weights whose keys no
// family knows are no error unless options.model is given.
LoadedModel load_model(const WeightsSource& source, const LoadModelOptions& options = {});

// Returns the family of the model that load_model() loads, without its values; null: unknown. `config`
// overrides what the source says. Throws Error.
const Family* family_of_weights(const WeightsSource& source, bool ema, const nlohmann::json& config);

// Returns the fingerprint of a known model's values under diffusers' keys where its family has them: the same
// in any format. It has four parts: of the values rounded to bf16, of those that were rounded to f16 before,
// and both of the null rows, which are empty where the source has none.
std::string fingerprint_of_values(const LoadedModel& model);

// Refuses an adapter of another base than `model`, as far as its record tells. Either may have been rounded
// to bf16 or f16. Null rows count where both have them. `source` names the adapter. Throws Error with both
// fingerprints, or warns with `anyway`.
void check_base(const ModelRecord::AdapterInfo& adapter, const std::string& source, const LoadedModel& model,
                bool anyway);

// An adapter beside its base, in a file, PEFT's folder or a run.
struct FoundAdapter {
  std::string path{};                   // as given
  std::optional<WeightsSource> run{};   // absent: not a run's
  std::optional<ModelRecord> record{};  // absent: an adapter of another program
};
// `ema`: a run's average. Throws Error.
FoundAdapter find_adapter(const std::string& path, bool ema);

// Merges the adapter into the model and returns the number of changed layers. Its record is compared as
// check_base() does. Throws Error.
size_t merge_found_adapter(const FoundAdapter& adapter, bool anyway, LoadedModel& model);

// Returns how a model with the adapter is drawn: as its record says, if it has one, with the model and config
// of `base`, as far as that names them.
ModelRecord record_with_adapter(const ModelRecord& base, const FoundAdapter& adapter);

// Throws Error with the text, `advice` and how to go on in spite of it; with `anyway` prints the text as a
// warning.
void say_mismatch(const std::string& text, const std::string& advice, bool anyway);

}  // namespace kiln
