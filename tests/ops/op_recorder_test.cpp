#include "ops/op_recorder.h"

#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <stdexcept>
#include <thread>
#include <tuple>

#include "core/aten.h"
#include "ops/ops.h"
#include "ops/planned/engine_sums.h"

namespace kiln {
namespace {

template <class Program>
std::vector<OpRecord> recorded_ops(Program&& program) {
  OpRecorder recorder(/*timed=*/false);
  program();
  return recorder.take();
}

double flops_in_all(const std::vector<OpRecord>& ops) {
  double flops = 0;
  for (const OpRecord& op : ops) flops += op.flops;
  return flops;
}

at::Tensor random_leaf(at::IntArrayRef shape, at::Device device = at::kCPU) {
  return at::randn(shape).to(device).set_requires_grad(true);
}

TEST(OpRecorder, CountsElementwiseBytesOnce) {
  const at::Tensor a = at::ones({8, 16}), b = at::ones({16}), column = at::ones({8, 1}).expand({8, 16});
  const auto ops = recorded_ops([&] {
    (void)a.add(b);
    (void)a.mul(a);
    (void)a.add(column);
    (void)a.to(at::kBFloat16);
    at::Tensor copy = at::empty_like(a);
    copy.copy_(a);
  });
  ASSERT_EQ(ops.size(), 5u);
  EXPECT_EQ(ops[0].name, "aten::add");
  EXPECT_EQ(ops[0].bytes, 4 * (128 + 16 + 128));
  EXPECT_EQ(ops[1].bytes, 4 * (128 + 128)) << "the same operand twice is read once";
  EXPECT_EQ(ops[2].bytes, 4 * (128 + 8 + 128)) << "an expanded operand lies in memory once";
  EXPECT_EQ(ops[3].bytes, 128 * (4 + 2));
  EXPECT_EQ(ops[3].dtype, at::kBFloat16);
  EXPECT_EQ(ops[4].bytes, 4 * (128 + 128)) << "what is overwritten is not read";
  for (const OpRecord& op : ops) EXPECT_EQ(op.op_class, OpClass::kElementwise);
}

TEST(OpRecorder, LeavesOutWhatMovesNoData) {
  const at::Tensor a = at::ones({8, 16});
  EXPECT_TRUE(recorded_ops([&] {
                (void)a.view({16, 8}).transpose(0, 1).narrow(0, 1, 2).detach();
                (void)a.unbind(0);
                (void)at::empty_like(a);
                (void)a.to(at::kFloat);
                (void)a.reshape({-1});
              }).empty());
}

TEST(OpRecorder, LinearForwardAndBackward) {
  const at::Tensor x = random_leaf({3, 5, 8}), weight = random_leaf({6, 8}), bias = random_leaf({6});
  at::Tensor y;
  const auto forward = recorded_ops([&] { y = ops::linear(x, weight, bias, at::kFloat); });
  ASSERT_EQ(forward.size(), 1u);
  EXPECT_EQ(forward[0].name, "kiln::affine");
  EXPECT_EQ(forward[0].flops, 2 * 15 * 6 * 8);
  EXPECT_EQ(std::tuple(forward[0].m, forward[0].n, forward[0].k), std::tuple(15, 6, 8));
  EXPECT_EQ(forward[0].bytes, 4 * (15 * 8 + 6 * 8 + 6 + 15 * 6));
  const at::Tensor grad = at::ones_like(y);
  const auto backward = recorded_ops([&] { torch::autograd::grad({y}, {x, weight, bias}, {grad}); });
  EXPECT_EQ(flops_in_all(backward), 2 * flops_in_all(forward));
}

TEST(OpRecorder, GeluLinearIsItsGeluAndItsProduct) {
  const at::Tensor h = random_leaf({15, 8}), weight = random_leaf({6, 8});
  at::Tensor y;
  const auto ops = recorded_ops([&] { y = ops::gelu_tanh_linear(h, weight, {}, at::kFloat); });
  ASSERT_EQ(ops.size(), 2u);
  EXPECT_EQ(ops[0].name, "kiln::gelu_tanh");
  EXPECT_EQ(ops[0].bytes, 4 * (2 * 15 * 8));
  EXPECT_EQ(ops[1].name, "kiln::affine");
}

TEST(OpRecorder, AttentionForwardAndBackward) {
  const int64_t B = 2, N = 16, H = 3, d = 8;
  const at::Tensor qkv = random_leaf({B, N, 3, H, d});
  at::Tensor y;
  const auto forward = recorded_ops([&] { y = ops::packed_attention(qkv, 1); });
  ASSERT_EQ(forward.size(), 1u);
  EXPECT_EQ(forward[0].op_class, OpClass::kAttention);
  EXPECT_EQ(forward[0].flops, 4 * B * H * N * N * d);
  EXPECT_EQ(std::tuple(forward[0].m, forward[0].n, forward[0].k), std::tuple(B * H, N, d));
  const at::Tensor grad = at::ones_like(y);
  const auto backward = recorded_ops([&] { torch::autograd::grad({y}, {qkv}, {grad}); });
  EXPECT_EQ(flops_in_all(backward), 2.5 * flops_in_all(forward));
}

TEST(OpRecorder, ProductsAndConvolutionsOfAten) {
  at::NoGradGuard no_grad;
  const at::Tensor a = at::ones({4, 8}), b = at::ones({8, 5}), image = at::ones({2, 3, 10, 10});
  EXPECT_EQ(flops_in_all(recorded_ops([&] { (void)at::matmul(a, b); })), 2 * 4 * 8 * 5);
  EXPECT_EQ(flops_in_all(recorded_ops([&] { (void)at::addmm(at::ones({5}), a, b); })), 2 * 4 * 8 * 5);
  EXPECT_EQ(flops_in_all(recorded_ops([&] {
              (void)at::bmm(at::ones({3, 4, 8}), at::ones({3, 8, 5}));
            })),
            2 * 3 * 4 * 8 * 5);
  EXPECT_EQ(flops_in_all(recorded_ops([&] {
              (void)at::conv2d(image, at::ones({6, 3, 3, 3}), {}, 1, 1);
            })),
            2 * (2 * 10 * 10) * 6 * 27);
}

TEST(OpRecorder, OnlyWhileInScopeAndOnlyOne) {
  const at::Tensor a = at::ones({4});
  OpRecorder recorder(/*timed=*/true);
  (void)a.add(a);
  EXPECT_THROW(OpRecorder(/*timed=*/false), std::logic_error);
  const auto ops = recorder.take();
  ASSERT_EQ(ops.size(), 1u);
  EXPECT_GT(ops[0].seconds, 0);
  EXPECT_TRUE(recorder.take().empty());
}

// As autograd runs the backward of a GPU: in a thread of its own, under this one's state.
TEST(OpRecorder, SeesWhatAnotherThreadRunsForThisOne) {
  const at::Tensor a = at::ones({4});
  OpRecorder recorder(/*timed=*/true);
  std::thread([&, state = at::ThreadLocalState()] {
    const at::ThreadLocalStateGuard guard(state);
    (void)a.mul(a);
  }).join();
  std::thread([&] { (void)a.add(a); }).join();  // of its own accord
  (void)a.sub(a);
  const auto ops = recorder.take();
  ASSERT_EQ(ops.size(), 2u);
  EXPECT_EQ(ops[0].name, "aten::mul");
  EXPECT_GT(ops[0].seconds, 0);
  EXPECT_EQ(ops[1].name, "aten::sub");
}

// The engine adds the gradients of a tensor with two users; what functions of the graph add is their own.
TEST(OpRecorder, TheEngineAddsInPlaceOnlyWhereADeviceWould) {
  struct Names {
    std::string on_cpu, on_meta;
    bool operator==(const Names&) const = default;
  };
  const auto names = [](const auto& program) {
    const auto joined = [&](at::Device device) {
      std::string text;
      for (const OpRecord& op : recorded_ops([&] { program(device); })) text += op.name + " ";
      return text;
    };
    const EngineSumsInPlace in_place;
    return Names{joined(at::kCPU), joined(at::kMeta)};
  };
  const auto two_users = names([](at::Device device) {
    const at::Tensor x = at::ones({4}, device).set_requires_grad(true);
    torch::autograd::grad({x * 2 + x * 3}, {x}, {at::ones({4}, device)});
  });
  EXPECT_EQ(two_users.on_cpu, two_users.on_meta);
  EXPECT_NE(two_users.on_meta.find("aten::add_ "), std::string::npos);
  const auto forward = names([](at::Device device) {
    const at::NoGradGuard no_grad;
    (void)(at::ones({4}, device) + at::ones({4}, device));
  });
  EXPECT_EQ(forward.on_meta.find("aten::add_ "), std::string::npos);
  EXPECT_EQ(forward.on_cpu, forward.on_meta);
}

}  // namespace
}  // namespace kiln
