// Lets several observers watch one step.
#pragma once
#include <algorithm>
#include <vector>

#include "step/step_observer.h"

namespace kiln {

// Calls begin in the order of adding and end in reverse, so the observer added last sees the least of the
// others.
class ObserverGroup : public StepObserver {
 public:
  // REQUIRES: `observer` outlives this or is removed; not called inside a phase.
  void add(StepObserver* observer) { observers_.push_back(observer); }
  void remove(StepObserver* observer) { std::erase(observers_, observer); }

  void begin_micro_step(int64_t index) override {
    for (StepObserver* observer : observers_) observer->begin_micro_step(index);
  }
  void end_micro_step() override {
    for (auto observer = observers_.rbegin(); observer != observers_.rend(); ++observer)
      (*observer)->end_micro_step();
  }
  void begin_call(const RankCall& call) override {
    for (StepObserver* observer : observers_) observer->begin_call(call);
  }
  void end_call(const RankCall& call) override {
    for (auto observer = observers_.rbegin(); observer != observers_.rend(); ++observer)
      (*observer)->end_call(call);
  }
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
