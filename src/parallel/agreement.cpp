#include "parallel/agreement.h"

#include <vector>

#include "core/error.h"

namespace kiln {

namespace {

// Without "[who] ", which the error that names the rank has already.
std::string message_of(const std::exception& error) {
  std::string text = error.what();
  text = text.substr(0, text.find('\n'));
  const size_t end = text.starts_with("[") ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

}  // namespace

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
    if (!errors[rank].empty()) fail("ranks", "rank {} of {}: {}", rank, errors.size(), errors[rank]);
}

}  // namespace kiln
