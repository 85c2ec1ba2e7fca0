// Writes the adapter that a run trained in the forms that other programs read.
#pragma once
#include <string>
#include <vector>

#include "models/family.h"
#include "models/load_model.h"
#include "models/lora_keys.h"

namespace kiln {

// True if these weights are an adapter's, not a model's.
bool is_run_adapter(const WeightsSource& source);
// Reads the adapter of a run. Throws Error.
std::vector<LoraLayer> read_run_adapter(const WeightsSource& source);
// Writes it to `out`: a folder (PEFT's, with adapter_config.json) or a safetensors file. `format`: peft,
// diffusers or kohya; "": PEFT's as a folder, else diffusers'. `dtype`: "" keeps the adapter's. Throws Error.
void write_run_adapter(const WeightsSource& source, const std::string& out, const std::string& format,
                       const std::string& dtype);

// Adds the adapter at `path`, from another program or a run, to the model's weights. `ema`: take the average
// of a run. Throws Error for an adapter of another base, unless `anyway`.
void merge_given_adapter(const std::string& path, bool ema, bool anyway, LoadedModel& model);

}  // namespace kiln
