// A graph for a CPU: a replay runs the recorded work.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "parallel/device_graph.h"
#include "parallel/graph_cache.h"

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

// Graphs of repeated work, how many were recorded and what was warned of.
struct Recording {
  int captures = 0;
  std::vector<std::string> warnings;
  GraphOptions options() {
    return {.make_graph = [this] { return std::make_unique<RepeatedWork>(captures); },
            .warn = [this](const std::string& line) { warnings.push_back(line); }};
  }
};

}  // namespace kiln::test
