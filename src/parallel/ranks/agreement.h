// How the ranks of a command meet, what must be the same on all of them, and how the failure of one becomes
// an error of all.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "core/error.h"
#include "core/json.h"
#include "parallel/ranks/process_group.h"

namespace kiln {

// An error that is the same on all ranks and that all of them know.
class CommonError : public Error {
 public:
  using Error::Error;
};

// Calls `work`, which must make no collective call, and waits until the other ranks have done theirs. If it
// failed on any rank, throws the same CommonError on every rank, naming the first rank that failed. A
// collective.
void agree(ProcessGroup& group, const std::string& what, const std::function<void()>& work);

// Returns how many ranks this process must launch (--nproc) instead of working, or 0 if it is one of the
// ranks. `who` begins messages. Throws Error if --nproc does not fit what a launcher has started.
int64_t ranks_to_launch(const std::string& who, int64_t nproc);

// Joins the ranks of a command in which each computes for itself and meets the others only at the end. They
// wait for each other as long as it takes. `build`: this program's build. Throws Error if ranks do not come
// or are of different builds.
std::shared_ptr<ProcessGroup> join_patiently(const std::string& build);

// Calls work(). An error of this rank is reported to those that wait for it, and names the rank if there are
// several. One about missing ranks, or that all ranks know, passes unchanged.
void as_rank(ProcessGroup& group, const std::function<void()>& work);

// Throws Error on every rank, naming a setting that differs, its values and the ranks that have them. A
// collective. `settings`: an object like {"--lr": 0.001}.
void require_same_on_all_ranks(ProcessGroup& group, const nlohmann::json& settings);

}  // namespace kiln
