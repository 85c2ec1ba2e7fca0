// What one rank could not do is an error of all of them.
#pragma once
#include <functional>
#include <string>

#include "parallel/ranks/process_group.h"

namespace kiln {

// Calls `work`, which may make no collective call, and waits for the other ranks to have done theirs. Throws
// Error on every rank, the same one, when it failed on any: of several ranks the error names the first. A
// collective.
void agree(ProcessGroup& group, const std::string& what, const std::function<void()>& work);

}  // namespace kiln
