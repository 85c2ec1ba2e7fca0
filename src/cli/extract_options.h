// The options that extract shares with what looks at the same pictures before it.
#pragma once
#include <CLI/CLI.hpp>

#include "extract/settings.h"

namespace kiln::cli {

// Adds --image-size, --buckets, --bucket-min, --exif-orientation and --enlarge.
void add_size_options(CLI::App& command, ExtractOptions& options);
// Adds --captions and the texts around them.
void add_caption_options(CLI::App& command, CaptionOptions& captions);

}  // namespace kiln::cli
