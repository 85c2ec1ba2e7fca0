#include "sample/sampler_loop.h"

namespace kiln {
namespace {

struct PassInput {
  ModelInput of_model;
};

std::vector<at::Tensor*> graph_tensors(PassInput& pass) {
  ModelInput& input = pass.of_model;
  std::vector<at::Tensor*> tensors;
  for (at::Tensor* tensor : {&input.x_t, &input.timesteps, &input.tokens.ids, &input.tokens.counts})
    if (tensor->defined()) tensors.push_back(tensor);
  input.conditioning.visit([&](at::Tensor& tensor) { tensors.push_back(&tensor); });
  return tensors;
}

std::vector<int64_t> graph_key(const PassInput& pass) {
  std::vector<int64_t> key = host_numbers(pass.of_model.conditioning);
  const TokenRows& tokens = pass.of_model.tokens;
  for (const at::Tensor& part : {tokens.ids, tokens.counts}) key.push_back(part.defined());
  key.insert(key.end(), tokens.host_offsets.begin(), tokens.host_offsets.end());
  return key;
}

}  // namespace

ForwardFn graphed_forward(const ForwardFn& forward, GraphOptions options) {
  const auto passes = std::make_shared<GraphCache<PassInput>>(
      [forward](const PassInput& pass) { return std::vector{forward(pass.of_model)}; }, std::move(options));
  return [passes, forward](const ModelInput& input) {
    const auto outputs = passes->run({input});
    return outputs ? outputs->front() : forward(input);
  };
}

}  // namespace kiln
