// Passes through a graph: which shapes are recorded, what a replay reads and returns, and what happens where
// nothing can be recorded. The graph here runs its recorded work again, on the CPU.
#include "sample/sampler_loop.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "core/aten.h"
#include "repeated_work.h"

namespace kiln {
namespace {

ModelInput input_of(double value, int64_t batch) {
  return {.x_t = at::full({batch, 2, 4, 4}, value),
          .timesteps = at::full({batch}, 2 * value),
          .conditioning = {.class_labels = at::full({batch}, 3, at::kLong)}};
}

at::Tensor weigh(const ModelInput& input) {
  return input.x_t +
         input.timesteps.view({-1, 1, 1, 1}) * input.conditioning.class_labels.view({-1, 1, 1, 1});
}

struct GraphedForwardTest : ::testing::Test, test::Recording {};

TEST_F(GraphedForwardTest, ReplaysReadTheNewInputs) {
  const ForwardFn graphed = graphed_forward(weigh, options());
  std::vector<at::Tensor> kept;
  for (int i = 0; i < 5; ++i) kept.push_back(graphed(input_of(i, 3)));
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(at::equal(kept[i], weigh(input_of(i, 3)))) << "pass " << i;
  EXPECT_EQ(captures, 1);
  EXPECT_TRUE(warnings.empty());
}

TEST_F(GraphedForwardTest, EachShapeHasItsOwn) {
  const ForwardFn graphed = graphed_forward(weigh, options());
  for (int i = 0; i < 3; ++i)
    for (const int64_t batch : {3, 2})
      EXPECT_TRUE(at::equal(graphed(input_of(i, batch)), weigh(input_of(i, batch))));
  EXPECT_EQ(captures, 2);
}

// How captions are cut is read by the host: equal tensors of other rows are another pass.
TEST_F(GraphedForwardTest, HostOffsetsBelongToTheShape) {
  const ForwardFn graphed = graphed_forward(
      [](const ModelInput& input) { return input.x_t + input.conditioning.text.host_offsets[1]; }, options());
  for (const int64_t first : {1, 2, 1, 2, 1, 2}) {
    ModelInput input = input_of(0, 2);
    input.conditioning.text = {.rows = at::zeros({4, 8}), .host_offsets = {0, first, 4}};
    EXPECT_EQ(graphed(input).view(-1)[0].item<float>(), static_cast<float>(first));
  }
  EXPECT_EQ(captures, 2);
}

TEST_F(GraphedForwardTest, FurtherShapesRunWithout) {
  GraphOptions few = options();
  few.most_shapes = 1;
  const ForwardFn graphed = graphed_forward(weigh, few);
  for (int i = 0; i < 3; ++i)
    for (const int64_t batch : {3, 2})
      EXPECT_TRUE(at::equal(graphed(input_of(i, batch)), weigh(input_of(i, batch))));
  EXPECT_EQ(captures, 1);
}

TEST_F(GraphedForwardTest, WhatCannotBeRecordedRunsAndSaysWhyOnce) {
  GraphOptions failing = options();
  failing.make_graph = []() -> std::unique_ptr<DeviceGraph> {
    throw std::runtime_error("a value was looked at\nwith a trace of the stack");
  };
  const ForwardFn graphed = graphed_forward(weigh, failing);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(at::equal(graphed(input_of(i, 2)), weigh(input_of(i, 2))));
  EXPECT_EQ(warnings, std::vector<std::string>{"a value was looked at"});
}

TEST_F(GraphedForwardTest, ACpuHasNoGraphs) { EXPECT_EQ(make_device_graph(at::kCPU), nullptr); }

}  // namespace
}  // namespace kiln
