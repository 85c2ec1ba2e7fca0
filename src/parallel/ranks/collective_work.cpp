#include "parallel/ranks/collective_work.h"

#include "core/error_message.h"
#include "parallel/ranks/connection.h"

namespace kiln {

void CollectiveWork::fail_with(const std::exception& error) const {
  const auto lasted = std::chrono::steady_clock::now() - begin;
  connection->fail_missing(name, lasted, message_of(error) + connection->heartbeat->describe_missing(number));
}

}  // namespace kiln
