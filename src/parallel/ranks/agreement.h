// Makes the failure of one rank an error of all ranks.
#pragma once
#include <functional>
#include <string>

#include "core/error.h"
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

}  // namespace kiln
