// Writes the adapter that a run trained in the forms that other programs read.
#pragma once
#include <string>

#include "models/weights_source.h"

namespace kiln {

// True if these weights are an adapter's, not a model's.
bool is_run_adapter(const WeightsSource& source);
// Writes it to `out`: a folder (PEFT's, with adapter_config.json) or a safetensors file. `format`: peft,
// diffusers or kohya; "": PEFT's as a folder, else diffusers'. `dtype`: "" keeps the adapter's. Throws Error
// for files of other programs in its place, unless it may overwrite them.
void write_run_adapter(const WeightsSource& source, const std::string& out, const std::string& format,
                       const std::string& dtype, bool overwrite);

}  // namespace kiln
