// `kiln sample`: pictures from a trained model.
#pragma once
#include "parallel/ranks/process_group.h"
#include "sample/sample_options.h"

namespace kiln {

// Draws what is not there yet and says how it goes on stderr. Several ranks take batches in turn; each writes
// its images as PNG files, of which the first makes the .npz. Throws Error.
void run_sample_command(const SampleCommand& command, ProcessGroup& group);

}  // namespace kiln
