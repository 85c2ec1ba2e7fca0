#include "parallel/ranks/collective.h"

#include "core/aten.h"
#include "parallel/ranks/collective_work.h"
#include "parallel/ranks/heartbeat.h"

namespace kiln {

Collective::Collective() = default;
Collective::Collective(std::unique_ptr<CollectiveWork> work) : work_(std::move(work)) {}
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
    work_->wait();
  } catch (const MissingRanks&) {  // whoever waits for its result is told
    // Its thread still waits and holds the tensors.
    static_cast<void>(work_.release());
  } catch (const std::exception&) {
  }
}

void Collective::wait() {
  if (!work_) return;
  std::unique_ptr<CollectiveWork> work = std::move(work_);
  if (work->observer && *work->observer) (*work->observer)->waited(work->number);
  if (!work->work) return;
  try {
    work->wait();
  } catch (const MissingRanks&) {
    static_cast<void>(work.release());  // its thread still waits and holds the tensors
    throw;
  } catch (const std::exception& error) {
    work->fail_with(error);
  }
}

}  // namespace kiln
