// The folder of a training run, for readers of its weights: RUN/config.json, which is their record, and the
// choice among its checkpoints' files.
#pragma once
#include <optional>
#include <string>

#include "models/model_record.h"

namespace kiln {

// True for the folder of a training run: it has a config.json and a folder of checkpoints.
bool is_run_folder(const std::string& path);

// Writes RUN/config.json atomically. Throws Error.
void write_run_info(const std::string& run, const ModelRecord& info);
// Reads RUN/config.json. Throws Error naming the file and the key that is missing or of the wrong kind.
ModelRecord read_run_info(const std::string& run);

// Returns the name of the file in a checkpoint of the run: of the EMA of `decay` (absent: the run's first),
// or of the model itself if `use_ema` is false or the run has no EMA. Throws Error: no such decay.
std::string weights_file_name(const std::string& run, const ModelRecord& info, bool use_ema,
                              std::optional<double> decay);

}  // namespace kiln
