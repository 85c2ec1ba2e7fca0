// The spans that a step is recorded in, and the maps over them.
#include "step/span_recorder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "core/aten.h"
#include "core/error.h"
#include "plan/trace/passes.h"
#include "plan/trace/trace.h"
#include "train/settings.h"
#include "train/usable_options.h"

namespace kiln {
namespace {

using Kind = RankCall::Kind;

StepTrace traced(const nlohmann::json& settings, int64_t world_size = 1) {
  const TrainOptions options = changed(test::tiny_dit_options(), settings);
  return trace_every_micro_step(options, synthetic_shape(options), DryRunDevice::kCuda, world_size);
}

std::vector<Kind> calls_of(const Span& span, bool inside) {
  std::vector<Kind> kinds;
  for (const Span::Call& made : span.calls)
    if (made.inside == inside) kinds.push_back(made.call.kind);
  return kinds;
}

TEST(Spans, FollowTheWalkOfEachMicroStep) {
  const StepTrace trace = traced({{"global-batch", 7}, {"micro-batch", 3}});
  EXPECT_EQ(num_micro_steps(trace), 3);
  const size_t num_segments = trace.segments.size();
  std::vector<std::pair<StepPhase, int32_t>> walk = {{StepPhase::kInput, -1}, {StepPhase::kInput, -1}};
  for (size_t i = 0; i < num_segments; ++i) walk.emplace_back(StepPhase::kForward, i);
  walk.emplace_back(StepPhase::kLoss, -1);
  for (size_t i = num_segments; i-- > 0;) walk.emplace_back(StepPhase::kBackward, i);
  for (int64_t micro_step = 0; micro_step < 3; ++micro_step) {
    std::vector<std::pair<StepPhase, int32_t>> spans;
    for (const Span& span : trace.spans)
      if (span.micro_step == micro_step) spans.emplace_back(span.phase, span.segment);
    EXPECT_EQ(spans, walk) << micro_step;
  }
  const auto end = std::ranges::find_if(trace.spans, [](const Span& span) { return !span.in_micro_step(); });
  ASSERT_NE(end, trace.spans.end());
  EXPECT_EQ(end->phase, StepPhase::kGradNorm);
  EXPECT_TRUE(std::all_of(end, trace.spans.end(), [](const Span& span) { return !span.in_micro_step(); }));
}

// A rank that keeps everything makes the same calls as one that does not; they only do nothing.
TEST(Spans, HoldTheCallsOnTheTrainingState) {
  for (int64_t world_size : {1, 2}) {
    const StepTrace trace =
        traced({{"global-batch", 4}, {"zero-stage", world_size == 1 ? 0 : 3}}, world_size);
    std::vector<Kind> calls;
    for (const Span& span : trace.spans)
      for (const Span::Call& made : span.calls) calls.push_back(made.call.kind);
    const auto num = [&](Kind kind) { return std::ranges::count(calls, kind); };
    const auto num_segments = static_cast<int64_t>(trace.segments.size());
    EXPECT_EQ(num(Kind::kGather), 2 * num_segments);
    EXPECT_EQ(num(Kind::kRelease), 2 * num_segments - 1);
    EXPECT_EQ(num(Kind::kBeginGradients), num_segments);
    EXPECT_EQ(num(Kind::kReduce), num_segments);
    EXPECT_EQ(num(Kind::kFinishReductions), 1);
    EXPECT_EQ(num(Kind::kSumOfSquares), 1);
    EXPECT_EQ(num(Kind::kUpdate), 1);
    for (const Span& span : trace.spans) {
      const bool is_scale = span.phase == StepPhase::kGradNorm && !span.ops.empty() &&
                            span.ops.front().name == "kiln::step_scale";
      EXPECT_EQ(span.by_call,
                span.phase == StepPhase::kCommunication || span.phase == StepPhase::kOptimizer || is_scale);
      if (span.phase == StepPhase::kBackward) {
        EXPECT_EQ(calls_of(span, /*inside=*/true), (std::vector{Kind::kBeginGradients, Kind::kRelease}));
      }
      if (!span.by_call) continue;
      EXPECT_TRUE(std::ranges::all_of(span.ops, &OpRecord::by_call));
    }
    const bool communicates = std::ranges::any_of(
        trace.spans, [](const Span& span) { return span.phase == StepPhase::kCommunication; });
    EXPECT_EQ(communicates, world_size > 1);
  }
}

TEST(Spans, TellTheirBytes) {
  const StepTrace trace = traced({{"global-batch", 4}, {"recompute", "all"}});
  int64_t live = trace.memory.persistent_bytes, peak = live;
  for (const Span& span : trace.spans) {
    int64_t most = live;
    for (const MemoryEvent& event : span.events) most = std::max(most, live += event.bytes);
    EXPECT_EQ(span.live_bytes, live);
    EXPECT_EQ(span.peak_bytes, most);
    peak = std::max(peak, most);
  }
  EXPECT_EQ(live, trace.memory.persistent_bytes) << "a step leaves nothing behind";
  EXPECT_EQ(peak, trace.memory.peak_bytes);
}

// What is allocated before the first phase counts to it; what is freed after a phase, to that phase.
TEST(SpanRecorder, LeavesNoEventBetweenSpans) {
  SpanRecorder recorder;
  recorder.allocated(1, 100);
  recorder.begin_micro_step(0);
  recorder.begin(StepPhase::kForward, 0);
  recorder.allocated(2, 50);
  recorder.end(StepPhase::kForward, 0);
  recorder.freed(1, 100);
  recorder.end_micro_step();
  recorder.begin(StepPhase::kOptimizer, 0);
  recorder.freed(2, 50);
  recorder.freed(3, 10);  // older than the recording
  recorder.end(StepPhase::kOptimizer, 0);
  const RecordedStep step = recorder.finish();
  ASSERT_EQ(step.spans.size(), 2u);
  ASSERT_EQ(step.spans[0].events.size(), 3u);
  EXPECT_EQ(step.spans[0].events[1].kind, MemoryKind::kActivations);
  EXPECT_EQ(step.spans[0].peak_bytes, 150);
  EXPECT_EQ(step.spans[0].live_bytes, 50);
  EXPECT_EQ(step.spans[0].micro_step, 0);
  EXPECT_EQ(step.spans[1].live_bytes, 0);
  EXPECT_FALSE(step.spans[1].in_micro_step());
  EXPECT_EQ(step.memory.peak_by_kind.at(MemoryKind::kActivations), 150);
  EXPECT_TRUE(recorder.finish().spans.empty());
}

TEST(Passes, OneStandsForAllBetween) {
  RecordedStep step;
  for (int64_t pass = 0; pass < kDistinctPasses; ++pass) {
    const auto id = static_cast<uint64_t>(10 * pass);
    step.spans.push_back({.micro_step = pass,
                          .phase = StepPhase::kForward,
                          .segment = 0,
                          .events = {{id + 1, 100}, {id + 2, 7}, {id + 1, -100}}});
  }
  step.spans.push_back({.phase = StepPhase::kGradNorm});
  for (uint64_t pass = 0; pass < kDistinctPasses; ++pass)
    step.spans.back().events.push_back({10 * pass + 2, -7});
  find_bytes(step);
  const int64_t of_four = step.memory.peak_bytes;
  fold_equal_passes(step, 10, of_four + 7);
  EXPECT_EQ(step.spans[2].times, 7);
  EXPECT_EQ(step.spans[1].times, 1);
  EXPECT_EQ(step.memory.peak_bytes, of_four + 6 * 7) << "each pass leaves 7 bytes behind";
  std::map<uint64_t, int64_t> bytes;
  for (const Span& span : step.spans)
    for (const MemoryEvent& event : span.events) bytes[event.id] += event.bytes;
  for (const auto& [id, left] : bytes) EXPECT_EQ(left, 0) << "block " << id << " is freed as it was taken";
  EXPECT_EQ(step.spans.back().live_bytes, 0);
}

}  // namespace
}  // namespace kiln
