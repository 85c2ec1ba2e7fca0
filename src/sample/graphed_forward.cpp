#include "sample/graphed_forward.h"

#include <exception>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/aten.h"

namespace kiln {
namespace {

std::vector<at::Tensor*> tensors_of(ModelInput& input) {
  std::vector<at::Tensor*> tensors;
  for (at::Tensor* tensor : {&input.x_t, &input.timesteps, &input.tokens.ids, &input.tokens.counts})
    if (tensor->defined()) tensors.push_back(tensor);
  input.conditioning.visit([&](at::Tensor& tensor) { tensors.push_back(&tensor); });
  return tensors;
}

// All that the kernels of a pass depend on beside the values of its inputs.
std::vector<int64_t> shape_key(ModelInput& input) {
  std::vector<int64_t> key;
  const auto append = [&](const auto& numbers) {
    key.push_back(static_cast<int64_t>(numbers.size()));
    key.insert(key.end(), numbers.begin(), numbers.end());
  };
  for (const at::Tensor* tensor : tensors_of(input)) {
    key.push_back(static_cast<int64_t>(tensor->scalar_type()));
    append(tensor->sizes());
  }
  // Tensors that are not there change which part a later one stands for.
  const Conditioning& c = input.conditioning;
  for (const at::Tensor& part : {input.tokens.ids, input.tokens.counts, c.class_labels, c.text.rows,
                                 c.text.offsets, c.text.dropped, c.image_hw, c.aspect_ratio, c.guidance})
    key.push_back(part.defined());
  append(input.conditioning.text.host_offsets);
  append(input.tokens.host_offsets);
  return key;
}

struct RecordedPass {
  ModelInput input{};  // where the graph reads
  at::Tensor output{};
  std::unique_ptr<DeviceGraph> graph{};  // null: one pass has run, none is recorded
};

class GraphedForward {
 public:
  GraphedForward(ForwardFn forward, GraphedForwardOptions options)
      : forward_(std::move(forward)), options_(std::move(options)) {}

  at::Tensor operator()(ModelInput input) {
    if (is_off_) return forward_(input);
    const std::vector<int64_t> key = shape_key(input);
    const auto entry = passes_.find(key);
    if (entry == passes_.end()) {
      if (passes_.size() < options_.most_shapes) passes_.emplace(key, RecordedPass());
      return forward_(input);
    }
    RecordedPass& pass = entry->second;
    if (!pass.graph && !record(pass, input)) return forward_(input);
    copy_inputs(input, pass.input);
    pass.graph->replay();
    return pass.output.clone();  // the sampler may keep it, or write into it
  }

 private:
  bool record(RecordedPass& pass, ModelInput& input) {
    try {
      pass.graph = options_.make_graph();
      if (!pass.graph) throw std::runtime_error("this device records no graphs");
      pass.input = input;
      for (at::Tensor* tensor : tensors_of(pass.input)) *tensor = tensor->clone();
      pass.graph->capture([&] { pass.output = forward_(pass.input); });
      return true;
    } catch (const std::exception& error) {
      options_.warn("sampling runs without CUDA graphs: " + first_line(error.what()));
    }
    is_off_ = true;
    passes_.clear();
    return false;
  }

  static std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

  static void copy_inputs(ModelInput& from, ModelInput& to) {
    const std::vector<at::Tensor*> sources = tensors_of(from), targets = tensors_of(to);
    for (size_t i = 0; i < sources.size(); ++i) targets[i]->copy_(*sources[i], /*non_blocking=*/true);
  }

  ForwardFn forward_;
  GraphedForwardOptions options_;
  std::map<std::vector<int64_t>, RecordedPass> passes_;
  bool is_off_ = false;
};

}  // namespace

ForwardFn graphed_forward(ForwardFn forward, GraphedForwardOptions options) {
  const auto graphed = std::make_shared<GraphedForward>(std::move(forward), std::move(options));
  return [graphed](const ModelInput& input) { return (*graphed)(input); };
}

}  // namespace kiln
