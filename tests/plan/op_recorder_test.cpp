#include "plan/trace/op_recorder.h"
#include "core/aten.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <ctime>
#include <map>
#include <thread>
#include <tuple>

#include "ops/ops.h"
#include "ops/planned/engine_sums.h"
#include "plan/described_ops.h"
#include "plan/price/step_timing.h"
#include "plan/ranks/step_time.h"
#include "plan/run/make_plan.h"
#include "plan/search/comparison.h"
#include "plan/trace/trace.h"
#include "run/option_values.h"

namespace kiln {
namespace {

template <class Program>
std::vector<OpRecord> recorded(Program&& program) {
  OpRecorder recorder(/*timed=*/false);
  program();
  return recorder.take();
}

double flops_of(const std::vector<OpRecord>& ops) {
  double flops = 0;
  for (const OpRecord& op : ops) flops += op.flops;
  return flops;
}

at::Tensor random(at::IntArrayRef shape, at::Device device = at::kCPU) {
  return at::randn(shape).to(device).set_requires_grad(true);
}

TEST(OpRecorder, CountsElementwiseBytesOnce) {
  const at::Tensor a = at::ones({8, 16}), b = at::ones({16}), column = at::ones({8, 1}).expand({8, 16});
  const auto ops = recorded([&] {
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
  EXPECT_TRUE(recorded([&] {
                (void)a.view({16, 8}).transpose(0, 1).narrow(0, 1, 2).detach();
                (void)a.unbind(0);
                (void)at::empty_like(a);
                (void)a.to(at::kFloat);
                (void)a.reshape({-1});
              }).empty());
}

TEST(OpRecorder, LinearForwardAndBackward) {
  const at::Tensor x = random({3, 5, 8}), weight = random({6, 8}), bias = random({6});
  at::Tensor y;
  const auto forward = recorded([&] { y = ops::linear(x, weight, bias, at::kFloat); });
  ASSERT_EQ(forward.size(), 1u);
  EXPECT_EQ(forward[0].name, "kiln::affine");
  EXPECT_EQ(forward[0].flops, 2 * 15 * 6 * 8);
  EXPECT_EQ(std::tuple(forward[0].m, forward[0].n, forward[0].k), std::tuple(15, 6, 8));
  EXPECT_EQ(forward[0].bytes, 4 * (15 * 8 + 6 * 8 + 6 + 15 * 6));
  const at::Tensor grad = at::ones_like(y);
  const auto backward = recorded([&] { torch::autograd::grad({y}, {x, weight, bias}, {grad}); });
  EXPECT_EQ(flops_of(backward), 2 * flops_of(forward));
}

TEST(OpRecorder, GeluLinearIsItsGeluAndItsProduct) {
  const at::Tensor h = random({15, 8}), weight = random({6, 8});
  at::Tensor y;
  const auto ops = recorded([&] { y = ops::gelu_tanh_linear(h, weight, {}, at::kFloat); });
  ASSERT_EQ(ops.size(), 2u);
  EXPECT_EQ(ops[0].name, "kiln::gelu_tanh");
  EXPECT_EQ(ops[0].bytes, 4 * (2 * 15 * 8));
  EXPECT_EQ(ops[1].name, "kiln::affine");
}

TEST(OpRecorder, AttentionForwardAndBackward) {
  const int64_t B = 2, N = 16, H = 3, d = 8;
  const at::Tensor qkv = random({B, N, 3, H, d});
  at::Tensor y;
  const auto forward = recorded([&] { y = ops::packed_attention(qkv, 1); });
  ASSERT_EQ(forward.size(), 1u);
  EXPECT_EQ(forward[0].op_class, OpClass::kAttention);
  EXPECT_EQ(forward[0].flops, 4 * B * H * N * N * d);
  EXPECT_EQ(std::tuple(forward[0].m, forward[0].n, forward[0].k), std::tuple(B * H, N, d));
  const at::Tensor grad = at::ones_like(y);
  const auto backward = recorded([&] { torch::autograd::grad({y}, {qkv}, {grad}); });
  EXPECT_EQ(flops_of(backward), 2.5 * flops_of(forward));
}

TEST(OpRecorder, ProductsAndConvolutionsOfAten) {
  at::NoGradGuard no_grad;
  const at::Tensor a = at::ones({4, 8}), b = at::ones({8, 5}), image = at::ones({2, 3, 10, 10});
  EXPECT_EQ(flops_of(recorded([&] { (void)at::matmul(a, b); })), 2 * 4 * 8 * 5);
  EXPECT_EQ(flops_of(recorded([&] { (void)at::addmm(at::ones({5}), a, b); })), 2 * 4 * 8 * 5);
  EXPECT_EQ(flops_of(recorded([&] {
              (void)at::bmm(at::ones({3, 4, 8}), at::ones({3, 8, 5}));
            })),
            2 * 3 * 4 * 8 * 5);
  EXPECT_EQ(flops_of(recorded([&] {
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

TrainOptions small_options(const std::string& dtype, const std::string& recompute) {
  TrainOptions options;
  options.model.name = "DiT-S/8";
  options.model.depth = 2;
  options.global_batch = 4;
  options.micro_batch = 3;
  set_option(options, "compute-dtype", dtype);
  options.memory.recompute = SegmentSet::parse(recompute);
  return options;
}

class TracedStep : public ::testing::TestWithParam<const char*> {
 protected:
  static void SetUpTestSuite() { at::set_num_threads(1); }  // small tensors: threads would only wait
};
INSTANTIATE_TEST_SUITE_P(Dtypes, TracedStep, ::testing::Values("f32", "bf16", "fp16"));

// Every operation, in order: name, dtype, work, phase and segment.
TEST_P(TracedStep, RunsTheSameOnMetaAndOnTheCpu) {
  for (const char* recompute : {"none", "0"}) {
    const TrainOptions options = small_options(GetParam(), recompute);
    SCOPED_TRACE(::testing::Message() << "recompute " << recompute);
    test::expect_same_operations(
        test::described(trace_step(options, synthetic_shape(options), DryRunDevice::kCpu).spans),
        test::described(time_steps(options, at::kCPU, {.plain = 1, .watched = 1, .warm_up = 0}).spans));
  }
}

// The engine adds the gradients of a tensor with two users; what functions of the graph add is their own.
TEST(TracedStep, TheEngineAddsInPlaceOnlyWhereADeviceWould) {
  struct Names {
    std::string on_cpu, on_meta;
    bool operator==(const Names&) const = default;
  };
  const auto names = [](const auto& program) {
    const auto joined = [&](at::Device device) {
      std::string text;
      for (const OpRecord& op : recorded([&] { program(device); })) text += op.name + " ";
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

// Nothing that multiplies is missed and nothing else is counted: at sizes that the model is not made for,
// with captions of mean length. Backward is twice the forward, and fused attention runs 2.5 times its
// forward.
TEST(TracedStep, FlopsAreThoseOfTheModel) {
  struct Counted {
    const char* model;
    int64_t depth, image_size;
    double tolerance;
  };
  for (const Counted& counted : {Counted{"DiT-S/2", 12, 256, 0.01},
                                 {"PixArt-Sigma-XL/2-1024", 2, 256, 0.02},
                                 {"Sana-600M", 2, 512, 0.02},
                                 {"sd15", 0, 256, 0.02}}) {
    SCOPED_TRACE(counted.model);
    TrainOptions options;
    options.model.name = counted.model;
    options.model.depth = counted.depth;
    options.data.image_size = counted.image_size;
    options.global_batch = 2;
    options = as_published(options, {"image-size"});
    const DataShape data = synthetic_shape(options);
    const StepTrace trace = trace_step(options, usual_shape(data).value_or(data), DryRunDevice::kCpu);
    double flops = 0, attention = 0;
    for (const OpRecord& op : ops_of(trace.spans)) {
      flops += op.flops;
      if (op.op_class == OpClass::kAttention) attention += op.flops;
    }
    const double beyond_twice = attention * 0.5 / 3.5;
    EXPECT_NEAR((flops - beyond_twice) / (2 * trace.flops_per_image), 1, counted.tolerance);
  }
}

TEST(TracedStep, RecomputeAddsTheForwardOfItsBlocks) {
  const auto flops = [](const std::string& recompute) {
    const TrainOptions options = small_options("bf16", recompute);
    double all = 0, again = 0;
    for (const Span& span : trace_step(options, synthetic_shape(options), DryRunDevice::kCuda).spans)
      for (const OpRecord& op : span.ops) {
        all += op.flops;
        if (span.phase == StepPhase::kRecompute) again += op.flops;
      }
    return std::pair(all, again);
  };
  const auto [none, none_again] = flops("none");
  const auto [all, all_again] = flops("all");
  EXPECT_EQ(none_again, 0);
  EXPECT_GT(all_again, 0.3 * none);
  EXPECT_DOUBLE_EQ(all, none + all_again);
}

// One of many equal micro-steps stands for all of them.
TEST(TracedStep, OfManyMicroStepsIsThatOfEveryOne) {
  for (DryRunDevice device : {DryRunDevice::kCpu, DryRunDevice::kCuda})
    for (const auto& [global_batch, world_size, stage] :
         std::vector<std::tuple<int64_t, int64_t, int64_t>>{{14, 1, 0}, {17, 1, 0}, {34, 2, 2}, {29, 2, 3}}) {
      TrainOptions options = small_options("bf16", "0");
      options.global_batch = global_batch;
      options.micro_batch = 2;
      options.zero.stage = stage;
      const DataShape data = synthetic_shape(options);
      const StepTrace composed = trace_step(options, data, device, world_size),
                      whole = trace_every_micro_step(options, data, device, world_size);
      EXPECT_EQ(composed.memory.peak_bytes, whole.memory.peak_bytes) << global_batch;
      EXPECT_EQ(composed.memory.peak_phase, whole.memory.peak_phase);
      EXPECT_EQ(composed.memory.persistent, whole.memory.persistent);
      EXPECT_LT(composed.spans.size(), whole.spans.size());
      EXPECT_EQ(num_micro_steps(composed), num_micro_steps(whole));
      std::map<std::string, double> counts;
      double flops = 0;
      const auto add = [&](const StepTrace& trace, double sign) {
        for (const Span& span : trace.spans)
          for (const OpRecord& op : span.ops) {
            counts[fmt::format("{} {} of {}", op.name, name_of(span.phase), span.segment)] +=
                sign * static_cast<double>(span.times);
            flops += sign * static_cast<double>(span.times) * op.flops;
          }
      };
      add(composed, 1);
      add(whole, -1);
      for (const auto& [what, difference] : counts) EXPECT_EQ(difference, 0) << what;
      EXPECT_EQ(flops, 0);
      const MachineProfile machine = find_profile("A100-80G");
      const Sharding sharding{.gpus = world_size, .zero_stage = stage};
      if (device == DryRunDevice::kCpu) continue;
      EXPECT_NEAR(
          time_step(composed, machine, sharding).seconds / time_step(whole, machine, sharding).seconds, 1,
          0.01);
    }
}

TEST(TracedStep, LargestModelInAFractionOfASecond) {
  TrainOptions options;
  options.model.name = "DiT-XL/2";
  options.compute.dtype = at::kBFloat16;
  const std::clock_t begin = std::clock();  // of this process: other programs do not count
  const StepTrace trace = trace_step(options, synthetic_shape(options), DryRunDevice::kCuda);
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  RecordProperty("seconds", std::to_string(seconds));
  EXPECT_GT(ops_of(trace.spans).size(), 1000u);
  EXPECT_LT(seconds, 0.6) << "0.1 s on an idle machine";
}

}  // namespace
}  // namespace kiln
