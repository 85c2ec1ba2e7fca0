#include "watch/by_products.h"

#include "core/error.h"
#include "core/text/printable.h"

namespace kiln {

bool ByProducts::try_to_write(const std::string& name, const std::function<void()>& write) try {
  write();
  return true;
} catch (const std::exception& error) {
  if (missed_.insert(name).second)
    fmt::print(stderr, "warning: training goes on without {}: {}\n", name,
               printable(message_of(error), "\n"));
  return false;
}

}  // namespace kiln
