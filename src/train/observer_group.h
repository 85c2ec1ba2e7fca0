// Several observers of one step.
#pragma once
#include <algorithm>
#include <vector>

#include "train/step_observer.h"

namespace kiln {

// Passes on in the order of adding, ends in the reverse: what is added last sees the least of the others.
class ObserverGroup : public StepObserver {
 public:
  // REQUIRES: `observer` outlives this or is removed; not called inside a phase.
  void add(StepObserver* observer) { observers_.push_back(observer); }
  void remove(StepObserver* observer) { std::erase(observers_, observer); }

  void begin(StepPhase phase, int64_t segment) override {
    for (StepObserver* observer : observers_) observer->begin(phase, segment);
  }
  void end(StepPhase phase, int64_t segment) override {
    for (auto observer = observers_.rbegin(); observer != observers_.rend(); ++observer)
      (*observer)->end(phase, segment);
  }

 private:
  std::vector<StepObserver*> observers_;
};

}  // namespace kiln
