// Tables of one run: on several numbers of GPUs, with several options.
#pragma once
#include <string>

#include "plan/report/report.h"

namespace kiln {

// The run of `options` on 1 to 8 GPUs and twice as many each time after that: with the same batch in all, and
// with the same images per GPU.
std::string gpus_table(const TableOptions& options);

// DiT-XL/2 with fast-DiT's options one after another, beside what its authors measured on one A100.
std::string options_table(const TableOptions& options);

// DiT's published results in PyTorch, beside its paper's, with the plan of each run.
std::string results_table(const TableOptions& options);

}  // namespace kiln
