#include "parallel/ranks/collective_work.h"

#include "core/aten.h"
#include "core/error.h"
#include "parallel/ranks/connection.h"

namespace kiln {

namespace {

// Nearly every collective is over by then. The ranks are only watched during those that are not.
constexpr std::chrono::seconds kBeforeALook(1);

// Waits, and returns true if the work is over. c10d throws both when a wait times out and when the work
// failed.
bool is_over_after(c10d::Work& work, std::chrono::milliseconds patience) try {
  work.wait(patience);
  return true;
} catch (const std::exception&) {
  if (!work.isCompleted()) return false;
  work.wait();  // throws again if it failed; it may also have ended well just after the time was over
  return true;
}

}  // namespace

void CollectiveWork::wait() {
  if (!tensors.front().is_cpu()) {  // the stream waits
    work->wait();
    return;
  }
  if (!is_over_after(*work, kBeforeALook)) look_after_ranks();
  if (sums.defined() && !tensors.front().is_alias_of(sums)) tensors.front().copy_(sums);
}

void CollectiveWork::look_after_ranks() {
  const auto lasted = std::chrono::steady_clock::now() - begin;
  const auto rest =
      connection->options.timeout - std::chrono::duration_cast<std::chrono::milliseconds>(lasted);
  const auto missing =
      connection->heartbeat->wait_until([this] { return work->isCompleted(); }, rest, Silence::kIsWaitedFor);
  if (missing)
    connection->fail_missing(name, std::chrono::steady_clock::now() - begin, "it does not end" + *missing);
  work->wait();
}

void CollectiveWork::fail_with(const std::exception& error) const {
  const auto lasted = std::chrono::steady_clock::now() - begin;
  connection->fail_missing(name, lasted, message_of(error) + connection->heartbeat->describe_missing(number));
}

}  // namespace kiln
