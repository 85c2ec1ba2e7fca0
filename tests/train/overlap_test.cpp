// What travels while what is computed: the order in which a step on real ranks begins its collectives, waits
// for them and walks its segments.
#include <gmock/gmock.h>

#include <map>

#include "parallel/rank_threads.h"
#include "train/placements.h"

namespace kiln {
namespace {

using test::rows_of, test::TinyOptions, test::TinyTraining;

constexpr int64_t kRanks = 3, kGlobalBatch = 9;

// Everything that happens in a step, in order: "backward 2", "backward 2 ends", "+the gradients of blocks.1",
// "-the gradients of blocks.1" where that is waited for.
class Events : public StepObserver, public CollectiveObserver {
 public:
  void begin(StepPhase phase, int64_t segment) override { add(phase, segment, ""); }
  void end(StepPhase phase, int64_t segment) override { add(phase, segment, " ends"); }
  void started(const Start& start) override {
    names_[start.number] = start.what;
    all_.push_back("+" + start.what);
  }
  void waited(int64_t number) override {
    const auto name = names_.find(number);
    if (name != names_.end()) all_.push_back("-" + name->second);
  }

  // The place of the first such event from `from` on. Fails when there is none.
  size_t find(const std::string& event, size_t from = 0) const {
    for (size_t i = from; i < all_.size(); ++i)
      if (all_[i] == event) return i;
    ADD_FAILURE() << event << " is not among the events from " << from << " on";
    return all_.size();
  }
  size_t count(const std::string& event, size_t end) const {
    return static_cast<size_t>(std::count(all_.begin(), all_.begin() + static_cast<int64_t>(end), event));
  }
  size_t first_with(const std::string& part) const {
    const auto found =
        std::ranges::find_if(all_, [&](const std::string& event) { return event.find(part) != event.npos; });
    return static_cast<size_t>(found - all_.begin());
  }
  size_t size() const { return all_.size(); }

 private:
  void add(StepPhase phase, int64_t segment, const char* what) {
    all_.push_back(fmt::format("{} {}{}", name_of(phase), segment, what));
  }
  std::vector<std::string> all_;
  std::map<int64_t, std::string> names_;
};

// Calls look(events, names of the segments, the way) on every rank, after a step that is not the first, for
// each of these ways to train.
template <class Look>
void look_at_steps(const std::vector<TinyOptions>& ways, const Look& look) {
  test::on_ranks(kRanks, [&](const std::shared_ptr<ProcessGroup>& group) {
    for (const TinyOptions& way : ways) {
      TinyOptions ranked = way;
      ranked.group = group;
      const TinyTraining tiny(ranked);
      Events events;
      tiny.step->run(rows_of(tiny.batch(kGlobalBatch, 0), *group), 1e-3);
      tiny.step->observe(&events);
      group->observe(&events);
      tiny.step->run(rows_of(tiny.batch(kGlobalBatch, 1), *group), 1e-3);
      group->observe(nullptr);
      tiny.step->observe(nullptr);
      std::vector<std::string> names;
      for (const auto& segment : tiny.denoiser->segments()) names.push_back(segment->name());
      look(events, names, way);
    }
  });
}

std::string phase(const char* name, size_t segment) { return fmt::format("{} {}", name, segment); }
const std::string kLoss = "loss -1";  // of no segment

// The gradients of a segment are on their way while those of the one before it are computed.
TEST(Overlap, OfReductionsWithTheBackwardOfTheNextSegment) {
  std::vector<TinyOptions> ways;
  for (int64_t stage = 0; stage <= 3; ++stage)
    for (const bool recompute : {false, true}) {
      ways.push_back({.zero = {.stage = stage}});
      if (recompute) ways.back().memory.assign(4, {.activations = Activations::kRecompute});
    }
  look_at_steps(
      ways, [](const Events& events, const std::vector<std::string>& names, const TinyOptions& way) {
        const int64_t stage = way.zero.stage;
        ASSERT_EQ(names.size(), 4u);
        for (size_t segment = names.size() - 1; segment > 0; --segment) {
          const std::string gradients = "the gradients of " + names[segment];
          const size_t begin = events.find("+" + gradients);
          EXPECT_GT(begin, events.find(phase("backward", segment) + " ends")) << stage;
          EXPECT_LT(begin, events.find(phase("backward", segment - 1))) << stage << " " << gradients;
          EXPECT_GT(events.find("-" + gradients), events.find(phase("backward", segment - 1) + " ends"))
              << stage << " " << gradients;
        }
      });
}

// The weights of a segment are on their way while the one before it in the walk computes.
TEST(Overlap, OfGathersWithTheSegmentThatComputes) {
  look_at_steps({{.zero = {.stage = 3}}}, [](const Events& events, const std::vector<std::string>& names,
                                             const TinyOptions&) {
    const size_t last = names.size() - 1;
    for (size_t segment = 1; segment <= last; ++segment) {
      const std::string weights = "the weights of " + names[segment];
      EXPECT_LT(events.find("+" + weights), events.find(phase("forward", segment - 1))) << weights;
      EXPECT_GT(events.find("-" + weights), events.find(phase("forward", segment - 1) + " ends")) << weights;
    }
    const size_t turn = events.find(kLoss);
    for (size_t segment = 0; segment < last; ++segment) {
      const std::string weights = "the weights of " + names[segment];
      EXPECT_LT(events.find("+" + weights, turn), events.find(phase("backward", segment + 1))) << weights;
      EXPECT_GT(events.find("-" + weights, turn), events.find(phase("backward", segment + 1) + " ends"))
          << weights;
    }
  });
}

// Without --prefetch-segments a segment's weights begin to come when it is its turn: the test above can fail.
TEST(Overlap, OfGathersIsWhatPrefetchingAsksFor) {
  look_at_steps({{.zero = {.stage = 3, .prefetch_segments = 0}}},
                [](const Events& events, const std::vector<std::string>& names, const TinyOptions&) {
                  for (size_t segment = 1; segment < names.size(); ++segment)
                    EXPECT_GT(events.find("+the weights of " + names[segment]),
                              events.find(phase("forward", segment - 1) + " ends"));
                });
}

// At stages 0 and 1 the micro-steps before the last send nothing; each unit's gradients travel once.
TEST(Overlap, OnlyTheLastMicroStepReducesWhereGradientsAreWhole) {
  constexpr size_t kMicroSteps = 3;
  std::vector<TinyOptions> ways;
  for (const int64_t stage : {0, 1, 2})
    ways.push_back({.accumulate_f32 = true, .micro_batch = 1, .zero = {.stage = stage}});
  look_at_steps(
      ways, [&](const Events& events, const std::vector<std::string>& names, const TinyOptions& way) {
        const bool are_whole = way.zero.stage < 2;
        if (are_whole) {
          EXPECT_EQ(events.count(kLoss, events.size()), kMicroSteps);
          EXPECT_EQ(events.count(kLoss, events.first_with("+the gradients of")), kMicroSteps);
        }
        for (const std::string& name : names)
          EXPECT_EQ(events.count("+the gradients of " + name, events.size()), are_whole ? 1 : kMicroSteps);
      });
}

}  // namespace
}  // namespace kiln
