// How the ranks of a command meet, and what has to be the same on all of them.
#pragma once
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "parallel/ranks/process_group.h"

namespace kiln {

// How many ranks this process has to launch (--nproc) instead of working; 0 when it is one of the ranks.
// `who` begins messages. Throws Error: --nproc does not fit what a launcher has started.
int64_t ranks_to_launch(const std::string& who, int64_t nproc);

// The ranks of a command that computes each for itself and meets only at the end: they wait for each other as
// long as it takes. `build`: of this program. Throws Error when they do not come, or are of different builds.
std::shared_ptr<ProcessGroup> join_patiently(const std::string& build);

// Calls work(). An error of this rank is told to those that wait for it, and names the rank when there are
// several; one about missing ranks passes as it is.
void as_rank(ProcessGroup& group, const std::function<void()>& work);

// Throws Error on every rank, naming a setting that differs, its values and the ranks that have them. A
// collective. `settings`: an object, "--lr": 0.001.
void require_same_on_all_ranks(ProcessGroup& group, const nlohmann::json& settings);

}  // namespace kiln
