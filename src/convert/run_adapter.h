// The adapter that a run trained, as other programs read it.
#pragma once
#include <string>
#include <vector>

#include "convert/weights_source.h"
#include "models/family.h"
#include "models/lora.h"

namespace kiln {

// Whether these weights are an adapter's, not a model's.
bool is_run_adapter(const WeightsSource& source);
// Throws Error.
std::vector<LoraLayer> read_run_adapter(const WeightsSource& source);
// Writes it to `out`: a folder (PEFT's, with adapter_config.json) or a safetensors file. `format`: peft,
// diffusers or kohya; "": PEFT's as a folder, else diffusers'. `dtype`: "" as it is. Throws Error.
void write_run_adapter(const WeightsSource& source, const std::string& out, const std::string& format,
                       const std::string& dtype);

// Adds the adapter at `path`, of whatever program or a run, to the weights. `ema`: of a run, its average.
void merge_given_adapter(const std::string& path, bool ema, TensorMap& weights);

}  // namespace kiln
