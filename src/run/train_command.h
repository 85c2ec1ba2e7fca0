// A run's options as a command to paste.
#pragma once
#include <string>

#include "run/train_options.h"

namespace kiln {

// Returns "kiln train --model ...", quoted for a shell, with every option that the command would not have
// without it: a model brings its size of pictures and its published settings (run/published_settings.h).
std::string command_line(const TrainOptions& options);

}  // namespace kiln
