// Runs work that repeats with inputs of few shapes as device graphs, one per shape.
#pragma once
#include <ATen/core/Tensor.h>

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "parallel/device_graph.h"

namespace kiln {

struct GraphOptions {
  std::function<std::unique_ptr<DeviceGraph>()> make_graph;
  // Called once, with one line that says why the work is done without graphs after all.
  std::function<void(const std::string&)> warn;
  size_t most_shapes = 8;  // further shapes are done without a graph
};

// An Input needs these two functions beside it:
//   std::vector<at::Tensor*> graph_tensors(Input&)  returns what the recorded work reads; all are defined
//   std::vector<int64_t> graph_key(const Input&)    returns all else that it depends on: what the host reads
// The caller does the first work of a shape itself, in which libraries initialise. The second is recorded,
// and later ones are replayed: their inputs are copied to where the recorded work reads them. Graphs run one
// after another and share their memory.
template <class Input>
class GraphCache {
 public:
  using Work = std::function<std::vector<at::Tensor>(const Input&)>;

  GraphCache(Work work, GraphOptions options) : work_(std::move(work)), options_(std::move(options)) {}

  // Returns the results of `work` for this input, each in memory of its own; undefined tensors stay
  // undefined. Returns nothing if the caller must do the work itself.
  std::optional<std::vector<at::Tensor>> run(Input input) {
    if (is_off_) return std::nullopt;
    const std::vector<int64_t> key = shape_key(input);
    const auto found = recorded_.find(key);
    if (found == recorded_.end()) {
      if (recorded_.size() < options_.most_shapes) recorded_.emplace(key, Recorded());
      return std::nullopt;
    }
    Recorded& recorded = found->second;
    if (!recorded.graph && !record(recorded, input)) return std::nullopt;
    const std::vector<at::Tensor*> sources = graph_tensors(input), targets = graph_tensors(*recorded.input);
    for (size_t i = 0; i < sources.size(); ++i) targets[i]->copy_(*sources[i], /*non_blocking=*/true);
    recorded.graph->replay();
    std::vector<at::Tensor> outputs;
    for (const at::Tensor& output : recorded.outputs)
      outputs.push_back(output.defined() ? output.clone() : output);
    return outputs;
  }

 private:
  struct Recorded {
    std::optional<Input> input;  // where the graph reads
    std::vector<at::Tensor> outputs;
    std::unique_ptr<DeviceGraph> graph;  // null: the work was done once, nothing is recorded
  };

  static std::vector<int64_t> shape_key(Input& input) {
    std::vector<int64_t> key = graph_key(input);
    for (const at::Tensor* tensor : graph_tensors(input)) {
      key.insert(key.end(), {static_cast<int64_t>(tensor->scalar_type()), tensor->dim()});
      key.insert(key.end(), tensor->sizes().begin(), tensor->sizes().end());
    }
    return key;
  }

  bool record(Recorded& recorded, const Input& input) {
    try {
      recorded.graph = options_.make_graph();
      if (!recorded.graph) throw std::runtime_error("this device records no graphs");
      recorded.input = input;
      for (at::Tensor* tensor : graph_tensors(*recorded.input)) *tensor = tensor->clone();
      recorded.graph->capture([this, &recorded] { recorded.outputs = work_(*recorded.input); }, first_);
      if (!first_) first_ = recorded.graph.get();
      return true;
    } catch (const std::exception& error) {
      const std::string text = error.what();
      options_.warn(text.substr(0, text.find('\n')));
    }
    is_off_ = true;
    recorded_.clear();
    return false;
  }

  Work work_;
  GraphOptions options_;
  std::map<std::vector<int64_t>, Recorded> recorded_;  // its entries stay where they are
  const DeviceGraph* first_ = nullptr;
  bool is_off_ = false;
};

}  // namespace kiln
