#include "parallel/ranks/collective.h"

#include "core/aten.h"
#include "parallel/ranks/collective_work.h"

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
    work_->work->wait();
  } catch (const std::exception&) {  // whoever waits for its result is told
  }
}

void Collective::wait() {
  if (!work_) return;
  const std::unique_ptr<CollectiveWork> work = std::move(work_);
  if (work->observer && *work->observer) (*work->observer)->waited(work->number);
  if (!work->work) return;
  try {
    work->work->wait();
  } catch (const std::exception& error) {
    work->fail_with(error);
  }
}

}  // namespace kiln
