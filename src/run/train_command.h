// Options as a command to paste.
#pragma once
#include <string>

#include "run/train_options.h"

namespace kiln {

// "kiln train --model ...": every option that is not the default, quoted for a shell.
std::string command_line(const TrainOptions& options);

}  // namespace kiln
