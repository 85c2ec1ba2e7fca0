// --accelerate default_config.yaml: what `accelerate config` writes, as options of training
// (docs/deepspeed.md).
#pragma once
#include <string>

#include "interop/deepspeed_config.h"

namespace kiln {

// What the file says of DeepSpeed is read as DeepSpeed's own file would be, and so is the file that it names.
// Throws Error: no such YAML, an unknown key, what Kiln cannot have, a contradiction with the command line.
DeepSpeedConfig parse_accelerate_config(const std::string& text, const std::string& name,
                                        const DeepSpeedContext& context);
DeepSpeedConfig read_accelerate_config(const std::string& path, const DeepSpeedContext& context);

}  // namespace kiln
