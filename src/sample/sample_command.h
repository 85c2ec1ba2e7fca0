// `kiln sample`: pictures from a trained model.
#pragma once
#include "parallel/ranks/process_group.h"
#include "sample/sample_options.h"

namespace kiln {

// Draws the images that are missing and shows progress on stderr. Several ranks take batches in turn. Each
// writes its images as PNG files, from which the first makes the .npz. Throws Error.
void run_sample_command(const SampleCommand& command, ProcessGroup& group);

}  // namespace kiln
