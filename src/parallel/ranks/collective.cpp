#include "parallel/ranks/collective.h"

#include "core/aten.h"
#include "core/error_message.h"
#include "parallel/ranks/collective_work.h"

namespace kiln {

void Collective::Work::fail_with(const std::exception& error) const {
  const auto lasted = std::chrono::steady_clock::now() - begin;
  group->connection_->fail_missing(
      name, lasted, message_of(error) + group->connection_->heartbeat->describe_missing(number));
}

Collective::Collective() = default;
Collective::Collective(std::unique_ptr<Work> work) : work_(std::move(work)) {}
Collective::Collective(Collective&&) noexcept = default;

Collective& Collective::operator=(Collective&& other) noexcept {
  if (this != &other) {
    Collective finished(std::move(*this));
    work_ = std::move(other.work_);
  }
  return *this;
}

Collective::~Collective() {
  if (!work_ || !work_->work) return;
  try {
    work_->work->wait();
  } catch (const std::exception&) {  // whoever waits for its result is told
  }
}

void Collective::wait() {
  if (!work_) return;
  const std::unique_ptr<Work> work = std::move(work_);
  CollectiveObserver* observer = work->group->root().observer_;
  if (work->is_observed && observer) observer->waited(work->number);
  if (!work->work) return;
  try {
    work->work->wait();
  } catch (const std::exception& error) {
    work->fail_with(error);
  }
}

}  // namespace kiln
