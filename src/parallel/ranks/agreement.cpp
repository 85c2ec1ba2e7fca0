#include "parallel/ranks/agreement.h"

#include <vector>

#include "core/error.h"

namespace kiln {

void agree(ProcessGroup& group, const std::string& what, const std::function<void()>& work) {
  if (group.world_size() == 1) return work();
  std::string mine;
  try {
    work();
  } catch (const std::exception& error) {
    mine = message_of(error);
  }
  const std::vector<std::string> errors = group.gather(mine, what);
  for (size_t rank = 0; rank < errors.size(); ++rank)
    if (!errors[rank].empty())
      throw CommonError(fmt::format("rank {} of {}: {}", rank, errors.size(), errors[rank]));
}

}  // namespace kiln
