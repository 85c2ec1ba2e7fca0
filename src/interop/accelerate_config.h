// --accelerate default_config.yaml: what `accelerate config` writes, as options of training
// (docs/deepspeed.md).
#pragma once
#include <string>

#include "interop/deepspeed_config.h"

namespace kiln {

// Translates the file into options of training. Its DeepSpeed section, or the DeepSpeed file that it names,
// is read by the rules of parse_deepspeed_config(). Throws Error if the text is not such YAML, has an unknown
// key, asks for what Kiln cannot do, or contradicts the command line.
DeepSpeedConfig parse_accelerate_config(const std::string& text, const std::string& name,
                                        const DeepSpeedContext& context);
DeepSpeedConfig read_accelerate_config(const std::string& path, const DeepSpeedContext& context);

}  // namespace kiln
