// A graph for a CPU: a replay runs the recorded work.
#pragma once
#include "parallel/device_graph.h"

namespace kiln::test {

class RepeatedWork : public DeviceGraph {
 public:
  explicit RepeatedWork(int& captures) : captures_(captures) {}
  void capture(const std::function<void()>& work, const DeviceGraph*) override {
    ++captures_;
    work_ = work;  // a device does nothing while it records
  }
  void replay() override { work_(); }

 private:
  int& captures_;
  std::function<void()> work_;
};

}  // namespace kiln::test
